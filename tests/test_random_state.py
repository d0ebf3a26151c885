"""No call of the library or the evaluation touches the user's random state; modes: test_devices.py."""

import random

import numpy as np
import pytest
import torch
from agentsd_eval.calibration.search import calibrate
from agentsd_eval.cost import architectures, latency
from agentsd_eval.images.methods import expand
from agentsd_eval.images.prompts import ImageSpec
from agentsd_eval.images.sampling import sample
from agentsd_eval.settings import CompareSettings, LatencySettings
from random_state import untouched
from recipes import STEP_CACHING
from tiny import make_unet

from agentsd import Recipe, apply_agentsd, remove_agentsd
from agentsd.modules import AgentModule, AttnZero, FocusedLinear

MODULES = [AgentModule(), FocusedLinear(), AttnZero()]


def test_the_guard_notices():
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    for touch in (
        *(lambda: torch.manual_seed(0), lambda: np.random.seed(0), lambda: random.seed(0)),
        *(lambda: torch.rand(1), np.random.rand, random.random),
        lambda: torch.set_rng_state(torch.get_rng_state()),
    ):
        with pytest.raises(AssertionError), untouched():
            touch()
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


@pytest.mark.parametrize("operator", MODULES, ids=lambda operator: operator.name)
def test_modules_are_built_saved_and_loaded(operator, tmp_path):
    unet, other = make_unet().train(), make_unet()
    with untouched():
        handle = apply_agentsd(unet, recipe=Recipe(operator))
        handle.save(tmp_path)
        remove_agentsd(unet)
        with apply_agentsd(other, recipe=tmp_path):
            other(torch.ones(1, 4, 8, 8), 1, torch.ones(1, 7, 16))


def test_calibration(plain, tmp_path):
    settings = {"num_inference_steps": 8, "resume": tmp_path / "measured.jsonl"}
    with untouched():
        calibrate(plain, ["a cat"], speedup=1.1, candidates=[STEP_CACHING], **settings)


def test_architectures_and_the_inputs_of_what_is_timed(monkeypatch):
    tiny = {"block_out_channels": (32, 32, 32, 32), "cross_attention_dim": 32, "sample_size": 16}
    monkeypatch.setattr(architectures, "SD15", architectures.SD15 | tiny)
    settings = LatencySettings(methods=("fast",))
    with untouched():
        pipe = architectures.build("sd15", torch.device("cpu"), torch.float32)
        for case in latency.cases_of(settings, pipe):
            run = latency.workload(pipe, case, settings)
            if case.scope != "pipeline":  # whose inputs are drawn by now
                run()


def test_samples_of_every_method(plain):
    settings = CompareSettings(steps=4, methods=("baseline", "fast", "agentsd", "tomesd"))
    with untouched():
        for method in expand(settings.methods, [0.4], settings, ()):
            sample(plain, method, [ImageSpec(0, "a cat", 0)], settings)


@pytest.fixture
def train(model_folder, photographs, tmp_path):
    """Train a short run with changed settings."""
    config = pytest.importorskip("agentsd.dreambooth.config", reason="needs the extra `train`")
    from accelerate.state import AcceleratorState

    from agentsd.dreambooth.training import Run

    base = {
        "pretrained_model_name_or_path": model_folder,
        "instance_data_dir": photographs,
        "instance_prompt": "a sks cat",
        "output_dir": tmp_path / "out",
        "max_train_steps": 2,
        "checkpointing_steps": 1,
        "num_inference_steps": 1,
        "num_validation_images": 1,
        "use_8bit_adam": False,
        "report_to": "none",
    }

    def run(**changes):
        AcceleratorState._reset_state(reset_partial_state=True)
        Run(config.DreamBoothConfig(**base | changes)).train()

    return run


def test_dreambooth(train, tmp_path):
    classes = {"with_prior_preservation": True, "class_data_dir": tmp_path / "class", "class_prompt": "a cat"}
    with untouched():
        train(train_text_encoder=True, num_class_images=1, **classes, max_train_steps=1)
        train(lora_rank=2, output_dir=tmp_path / "lora", max_train_steps=1)
        train(attention="focused", output_dir=tmp_path / "module", max_train_steps=1)
        train(attention="focused", output_dir=tmp_path / "module", resume_from_checkpoint="latest")


def test_lora_layers_start_as_pefts():
    training = pytest.importorskip("agentsd.dreambooth.training", reason="needs the extra `train`")
    unet = make_unet()
    inputs = torch.ones(1, 4, 8, 8), 1, torch.ones(1, 7, 16)
    before = unet(*inputs).sample
    with untouched():
        training._add_lora(unet, 4, seed=0)
    drawn = torch.cat([weight.flatten() for name, weight in unet.named_parameters() if "lora_A" in name])
    assert float(drawn.std()) == pytest.approx(1 / 4, rel=0.05)  # "gaussian": a deviation of 1 / rank
    assert float(drawn.mean()) == pytest.approx(0, abs=0.01)
    assert torch.equal(unet(*inputs).sample, before)  # lora_B is zero
