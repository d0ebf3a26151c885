"""A DreamBooth run: trains, saves, resumes, and comes back as a pipeline."""

import errno

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from diffusers import StableDiffusionPipeline
from PIL import Image
from random_state import untouched
from tiny import call, make_unet

from agentsd import Agents, Recipe, apply_agentsd
from agentsd.dreambooth import training
from agentsd.dreambooth.checkpoints import find_checkpoint, list_checkpoints
from agentsd.dreambooth.config import DreamBoothConfig
from agentsd.dreambooth.step import diffusion_loss
from agentsd.dreambooth.training import Run
from agentsd.modules import AgentModule

IN_EVERY_STEP = Recipe(
    Agents(at_most=None, agent_ratio=0.95, ranking="layer", destinations="random"), levels=1
)  # as the paper trains


@pytest.fixture(autouse=True)
def fresh_accelerate():
    """accelerate keeps its precision for the life of a process."""
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    """Three images of a subject."""
    folder = tmp_path_factory.mktemp("subject")
    for i, colour in enumerate(("red", "green", "blue")):
        Image.new("RGB", (40, 32), colour).save(folder / f"{i}.png")
    return folder


@pytest.fixture
def settings(model_folder, subject, tmp_path):
    """Settings of a short run, changed by keywords."""

    def make(**changes):
        base = {
            "pretrained_model_name_or_path": model_folder,
            "instance_data_dir": subject,
            "instance_prompt": "a sks cat",
            "output_dir": tmp_path / "out",
            "max_train_steps": 2,
            "learning_rate": 1e-3,
            "num_inference_steps": 2,
            "num_validation_images": 2,
            "use_8bit_adam": False,
            "report_to": None,
        }
        return DreamBoothConfig(**base | changes)

    return make


def weights(folder):
    return StableDiffusionPipeline.from_pretrained(folder).unet.state_dict()


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_calls_that_leave_something_out_are_refused(settings):
    with pytest.raises(ValueError, match=r"steps=.*each call in whole; leave steps out here, and pass it to"):
        settings(steps={"interval": 2})


def test_the_three_ways_to_apply_differ_as_they_should(settings, model_folder, tmp_path):
    results = {}
    for apply in ("train+generate", "generate", "none"):
        out, more = tmp_path / apply, {"validation_prompt": "a sks cat", "validation_steps": 2}
        with untouched():  # the user's random state
            Run(settings(apply=apply, output_dir=out, **more)).train()
        assert (out / "validation-2.png").exists()
        results[apply] = weights(out), (out / "grid.png").read_bytes(), (out / "agentsd.json").exists()
    assert equal(results["generate"][0], results["none"][0])
    assert not equal(results["generate"][0], weights(model_folder))
    assert not equal(results["generate"][0], results["train+generate"][0])
    assert results["generate"][1] != results["none"][1]
    assert [results[apply][2] for apply in results] == [True, True, False]
    pipe = StableDiffusionPipeline.from_pretrained(folder := tmp_path / "train+generate")
    assert Image.open(folder / "grid.png").size == (64, 32)
    assert apply_agentsd(pipe, recipe=folder).recipe == IN_EVERY_STEP


def test_a_resumed_run_ends_with_the_same_weights(settings, tmp_path):
    rate = {"lr_scheduler": "constant_with_warmup", "lr_warmup_steps": 4, "checkpointing_steps": 2}
    rate["checkpoints_total_limit"] = 1
    whole = Run(settings(max_train_steps=4, output_dir=tmp_path / "whole", **rate)).train()
    first = settings(max_train_steps=2, output_dir=tmp_path / "parts", **rate)
    Run(first).train()
    (tmp_path / "parts" / ".partial-3").mkdir()  # a run that was killed while it wrote
    rest = first.model_copy(update={"max_train_steps": 4, "resume_from_checkpoint": "latest"})
    run = Run(rest)
    assert run.resume is not None
    assert run.resume.name == "checkpoint-2"
    assert not list(run.resume.glob("custom_checkpoint*"))  # those would be unpickled
    assert equal(weights(run.train()), weights(whole))
    assert [path.name for path in list_checkpoints(tmp_path / "parts")] == ["checkpoint-4"]
    with pytest.raises(ValueError, match=r"checkpoint-2.*there: checkpoint-4"):
        find_checkpoint(tmp_path / "parts", "checkpoint-2")


def test_a_disk_that_fills_up_loses_no_checkpoint(settings, monkeypatch):
    config = settings(max_train_steps=4, checkpointing_steps=1)
    write = Accelerator.save_state

    def full(self, folder, **kwargs):
        write(self, folder, **kwargs)
        if folder.endswith("-3"):
            raise OSError(errno.ENOSPC, "No space left on device", folder)

    monkeypatch.setattr(Accelerator, "save_state", full)
    with pytest.raises(OSError, match="No space left"):
        Run(config).train()
    assert find_checkpoint(config.output_dir, "latest").name == "checkpoint-2"
    monkeypatch.undo()
    assert Run(config.model_copy(update={"resume_from_checkpoint": "latest"})).train()


def test_gradients_that_are_not_finite_end_the_run(settings, monkeypatch):
    """As cuDNN's attention gives them on an H200: it is off, and the checkpoint before stays good."""
    steps = []

    def loss(*args):
        steps.append(torch.backends.cuda.cudnn_sdp_enabled())
        return diffusion_loss(*args) * (1.0 if len(steps) < 3 else torch.nan)

    monkeypatch.setattr(training, "diffusion_loss", loss)
    config = settings(max_train_steps=4, checkpointing_steps=2)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with pytest.raises(
        FloatingPointError, match=r"step 3 are not finite: their norm is nan.*mixed_precision"
    ):
        Run(config).train()
    assert steps == [False] * 3
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
    assert [path.name for path in list_checkpoints(config.output_dir)] == ["checkpoint-2"]


def test_the_text_encoder_trains_too_in_half_precision(settings, model_folder, tmp_path):
    more = {"class_data_dir": tmp_path / "classes", "class_prompt": "a cat", "num_class_images": 2}
    more |= {"with_prior_preservation": True, "gradient_checkpointing": True, "mixed_precision": "bf16"}
    more |= {"max_train_steps": 1, "gradient_accumulation_steps": 2, "train_text_encoder": True}
    folder = Run(settings(**more)).train()
    trained, baseline = (StableDiffusionPipeline.from_pretrained(f) for f in (folder, model_folder))
    assert trained.unet.dtype == torch.float32
    assert not equal(trained.text_encoder.state_dict(), baseline.text_encoder.state_dict())


def test_lora_layers_start_as_pefts(settings, model_folder):
    """And are what is saved."""
    unet = make_unet()
    before = call(unet)
    with untouched():
        training._add_lora(unet, 4, seed=0)
    drawn = torch.cat([weight.flatten() for name, weight in unet.named_parameters() if "lora_A" in name])
    assert float(drawn.std()) == pytest.approx(1 / 4, rel=0.05)  # "gaussian": a deviation of 1 / rank
    assert torch.equal(call(unet), before)  # lora_B is zero
    folder = Run(settings(lora_rank=2, max_train_steps=1)).train()
    assert not (folder / "unet").exists()
    StableDiffusionPipeline.from_pretrained(model_folder).load_lora_weights(folder)


def test_trainable_attention_is_trained_and_comes_back(settings, model_folder):
    with untouched():
        folder = Run(settings(attention="module")).train()
    pipe = StableDiffusionPipeline.from_pretrained(folder)
    recipe = Recipe(AgentModule(), levels=1)
    start = apply_agentsd(StableDiffusionPipeline.from_pretrained(model_folder), recipe=recipe)
    untrained = [p.clone() for p in start.parameters()]
    handle = apply_agentsd(pipe, recipe=folder)
    assert handle.recipe == recipe
    moved = [not torch.equal(a, b) for a, b in zip(handle.parameters(), untrained, strict=True)]
    assert all(moved)
