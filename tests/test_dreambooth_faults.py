"""DreamBooth that is killed, fills a disk, runs out of memory, or goes on with other settings."""

import errno
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from collections import namedtuple
from contextlib import nullcontext

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from diffusers import DiffusionPipeline, UNet2DConditionModel
from hub import stand_in
from huggingface_hub import ModelCard
from PIL import Image
from safetensors.torch import load_file

from agentsd.dreambooth import checkpoints, images, inputs, models, results, training
from agentsd.dreambooth.checkpoints import list_checkpoints
from agentsd.dreambooth.config import DreamBoothConfig
from agentsd.dreambooth.data import image_paths
from agentsd.dreambooth.optimizer import in_8_bits, moment_bytes
from agentsd.dreambooth.training import Run


@pytest.fixture(autouse=True)
def fresh_accelerate():
    """accelerate keeps its precision for the life of a process."""
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def settings(model_folder, photographs, tmp_path):
    """Settings of a run of three steps that draws all that a run draws."""

    def make(**changes):
        base = {
            "pretrained_model_name_or_path": model_folder,
            "instance_data_dir": photographs,
            "instance_prompt": "a sks cat",
            "with_prior_preservation": True,
            "class_data_dir": tmp_path / "class",
            "class_prompt": "a cat",
            "num_class_images": 3,
            "sample_batch_size": 1,
            "output_dir": tmp_path / "out",
            "max_train_steps": 3,
            "learning_rate": 1e-3,
            "checkpointing_steps": 1,
            "validation_prompt": "a sks cat",
            "validation_steps": 2,
            "num_inference_steps": 1,
            "num_validation_images": 1,
            "report_to": None,
        }
        return DreamBoothConfig(**base | changes)

    return make


def weights(folder):
    return UNet2DConditionModel.from_pretrained(folder, subfolder="unet").state_dict()


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def at_call(number, error, original):
    """A function that fails at its call of that number, and else is the original."""
    calls = []

    def call(*args, **kwargs):
        calls.append(args)
        if len(calls) == number:
            raise error
        return original(*args, **kwargs)

    return call


FULL = OSError(errno.ENOSPC, "No space left on device")
STAGES = {  # where a run dies, and of what
    "a class image": (images, "_write_new", 2, KeyboardInterrupt()),
    "prompts": (inputs, "_tokens", 1, KeyboardInterrupt()),
    "the first step": (training, "diffusion_loss", 1, KeyboardInterrupt()),
    "the third step": (training, "diffusion_loss", 3, KeyboardInterrupt()),
    "a checkpoint": (Accelerator, "save_state", 2, FULL),
    "an old checkpoint": (checkpoints.shutil, "rmtree", 7, KeyboardInterrupt()),
    "validation": (training, "validate", 1, KeyboardInterrupt()),
    "the model": (training, "finish", 1, KeyboardInterrupt()),
    "the model's files": (DiffusionPipeline, "save_pretrained", 1, FULL),
    "the grid": (results, "generate", 2, KeyboardInterrupt()),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Where the weights of a run that nothing happened to are kept."""
    return tmp_path_factory.mktemp("whole") / "unet.pt"


SOON = ("a class image", "a checkpoint", "the model's files")


@pytest.mark.parametrize(
    "stage", [pytest.param(s, marks=() if s in SOON else pytest.mark.slow) for s in STAGES]
)
def test_a_run_that_died_goes_on_to_the_same_weights(settings, whole, tmp_path, monkeypatch, stage):
    if not whole.exists():
        Run(settings(output_dir=tmp_path / "whole")).train()
        torch.save(weights(tmp_path / "whole"), whole)
        shutil.rmtree(tmp_path / "class")
    place, name, number, error = STAGES[stage]
    config = settings(resume_from_checkpoint="latest")
    monkeypatch.setattr(place, name, at_call(number, error, getattr(place, name)))
    with pytest.raises(type(error)):
        Run(config).train()
    monkeypatch.undo()
    if stage == "the grid":  # all is there
        assert equal(weights(config.output_dir), torch.load(whole))
    AcceleratorState._reset_state(reset_partial_state=True)
    folder = Run(config).train()
    assert equal(weights(folder), torch.load(whole))
    assert {path.name for path in folder.iterdir()} >= {"model_index.json", "agentsd.json", "grid.png"}
    assert not list(folder.glob(".partial-model"))
    assert len(list((tmp_path / "class").iterdir())) == 3


def test_a_class_image_has_its_name_when_it_is_whole(tmp_path, monkeypatch):
    """A process may be killed at any byte: what is being written is not a class image yet."""
    place, save = tmp_path / "class-00001.png", Image.Image.save

    def slowly(image, file, format):
        save(image, file, format=format)
        assert image_paths(tmp_path) == []
        assert not place.exists()

    monkeypatch.setattr(Image.Image, "save", slowly)
    images._write_new(Image.new("RGB", (8, 8)), place)
    assert image_paths(tmp_path) == [place]
    assert os.listdir(tmp_path) == [place.name]


@pytest.mark.slow
@pytest.mark.parametrize(
    "sign", ["class/class-00001.png", "out/.partial-2", "out/.partial-model", "out/unet"]
)
def test_a_killed_command_goes_on_to_the_same_weights(settings, tmp_path, sign):
    """By SIGKILL, when a file appears."""
    words = [sys.executable, "-m", "agentsd.dreambooth", "--resume_from_checkpoint", "latest"]
    kept = settings().model_dump(
        mode="json", exclude={"resume_from_checkpoint", "report_to"}, exclude_none=True
    )
    del kept["with_prior_preservation"]
    flags = {name: value for name, value in kept.items() if not isinstance(value, bool)}
    words += [f"--{name}={value}" for name, value in flags.items()]
    words += ["--with_prior_preservation", "--report_to=none"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(words, env=environment)
    while run.poll() is None and not (tmp_path / sign).exists():
        time.sleep(0.001)
    run.kill()
    assert run.wait() != 0
    subprocess.run(words, check=True, env=environment)
    made = weights(tmp_path / "out")
    Run(settings(output_dir=tmp_path / "whole")).train()
    assert equal(made, weights(tmp_path / "whole"))


def fail(*args, **kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory")


FAILURES = {
    "validation failed": (results, "generate"),
    "drawing grid.png failed": (results, "generate"),
    "the tracker failed": (Accelerator, "log"),
    "the upload to me/out failed": (None, None),
}


@pytest.mark.parametrize("told", FAILURES)
def test_what_is_drawn_told_or_uploaded_may_fail(settings, tmp_path, monkeypatch, caplog, told):
    place, name = FAILURES[told]
    config = settings(max_train_steps=2, with_prior_preservation=False, push_to_hub=place is None)
    if place is None:
        stand_in(monkeypatch, upload=fail)
    else:
        monkeypatch.setattr(place, name, fail)
    with caplog.at_level(logging.WARNING, logger="agentsd"):
        folder = Run(config).train()
    assert f"{told}, and the run goes on: OutOfMemoryError: CUDA out of memory" in caplog.text
    assert (folder / "unet").exists()
    assert (folder / "grid.png").exists() == (place is not results)


def test_the_model_is_uploaded_without_checkpoints(settings, monkeypatch):
    given = {}
    stand_in(monkeypatch, upload=given.update)
    config = settings(with_prior_preservation=False, push_to_hub=True, hub_token="secret")
    folder = Run(config).train()
    assert (given["repo_id"], given["token"], given["folder_path"]) == ("me/out", "secret", folder)
    assert given["ignore_patterns"] == ["checkpoint-*", ".*", "logs/*"]
    readme = (folder / "README.md").read_text()
    card = ModelCard(readme).data
    assert (card.library_name, card.instance_prompt, card.base_model) == ("diffusers", "a sks cat", None)
    assert "lora" not in card.tags
    assert config.pretrained_model_name_or_path not in readme
    kept = [path.read_text() for path in folder.rglob("*.json")]
    assert not any("secret" in text for text in (*kept, readme, repr(config)))


def test_the_card_names_the_base_model(settings, monkeypatch):
    stand_in(monkeypatch)
    config = settings(pretrained_model_name_or_path="runwayml/sd", rank=4)
    card = results._model_card(config, "me/out").data
    assert card.base_model == "runwayml/sd"
    assert {"text-to-image", "dreambooth", "lora"} <= {*card.tags}


def test_a_hub_that_refuses_is_told_before_the_run(settings, monkeypatch):
    def refuse(*args, **kwargs):
        raise ConnectionError("no\nroute")

    monkeypatch.setattr("huggingface_hub.create_repo", refuse)
    with pytest.raises(
        ValueError, match=r"push_to_hub: ConnectionError: no route; log in by `hf auth login`"
    ):
        Run(settings(push_to_hub=True))


OTHER = {  # changes of a run that goes on, and what is said of them; None where it may
    "as resolved": ({"learning_rate": 1e-6, "mixed_precision": "no", "use_8bit_adam": False}, None),
    "what no step depends on": ({"validation_prompt": "a cat", "gradient_checkpointing": True}, None),
    "longer": ({"max_train_steps": 9}, None),
    "fewer class images": ({"num_class_images": 2}, None),
    "more class images": ({"num_class_images": 4}, ": num_class_images was 3, is 4;"),
    "several": (
        {"apply": "none", "learning_rate": 2e-3, "instance_prompt": "a sks dog"},
        ": instance_prompt was 'a sks cat', is 'a sks dog'; learning_rate was 1e-06, is 0.002; apply was",
    ),
    "a schedule": (
        {"lr_scheduler": "linear", "max_train_steps": 1},
        ": lr_scheduler was 'constant', is 'linear';",
    ),
    "precision": ({"mixed_precision": "bf16"}, ": mixed_precision was 'no', is 'bf16'"),
    "another image": ({}, ": instance_images was '9 images ("),
}


@pytest.fixture(scope="module")
def one_step(tmp_path_factory):
    """Where a run of a step is kept."""
    return tmp_path_factory.mktemp("one") / "step"


@pytest.mark.parametrize("case", OTHER)
def test_other_settings_are_named_and_refused(settings, one_step, photographs, tmp_path, monkeypatch, case):
    changes, told = OTHER[case]
    places = {"output_dir": one_step / "out", "class_data_dir": one_step / "class", "learning_rate": None}
    if not one_step.exists():
        Run(settings(**places, max_train_steps=1)).train()
    if case == "another image":
        shutil.copytree(photographs, tmp_path / "more")
        shutil.copy(photographs / "0.png", tmp_path / "more" / "10.png")
        changes = {"instance_data_dir": tmp_path / "more"}
    monkeypatch.chdir(one_step)
    config = settings(**places | {"output_dir": "out", "resume_from_checkpoint": "latest"} | changes)
    AcceleratorState._reset_state(reset_partial_state=True)
    if told is None:
        assert Run(config).resume.name == "checkpoint-1"
    else:
        with pytest.raises(ValueError, match=re.escape(f"other settings{told}")):
            Run(config)


def test_a_schedule_that_decays_keeps_its_length(settings):
    more = {"with_prior_preservation": False, "lr_scheduler": "linear", "max_train_steps": 2}
    folder = Run(settings(**more)).train()
    longer = settings(**more | {"max_train_steps": 3}, resume_from_checkpoint=str(folder / "checkpoint-2"))
    with pytest.raises(
        ValueError,
        match=r"was 2, is 3 \(max_train_steps may change under --lr_scheduler constant or",
    ):
        Run(longer)
    (folder / "checkpoint-2" / "settings.json").write_text("{")
    with pytest.raises(ValueError, match=r"checkpoint-2 has no readable settings.json"):
        Run(longer)


def test_devices_count_among_the_settings(settings):
    """Two halve a learning rate that is scaled: all the same, batches are others."""
    scaled = settings(scale_lr=True, lr_scheduler="linear", max_train_steps=None, num_train_epochs=4)
    paths = sorted(scaled.instance_data_dir.iterdir())
    one, two = (checkpoints.resolve_settings(scaled, paths, [], False, n) for n in (1, 2))
    differ = {name: (one[name], two[name]) for name in one if one[name] != two[name]}
    assert differ == {"learning_rate": (1e-3, 2e-3), "max_train_steps": (36, 20), "processes": (1, 2)}


def test_a_run_that_died_before_a_checkpoint_begins_anew(settings, tmp_path):
    """Where nothing but its own is in the folder; nobody is sent to checkpoints that aren't there."""
    inside = {"class_data_dir": tmp_path / "out" / "class"}
    latest = settings(resume_from_checkpoint="latest", **inside)
    for own in ("validation-2.png", "logs", ".partial-1", "class"):
        (tmp_path / "out" / own).mkdir(parents=True)
    assert Run(latest).resume is None
    with pytest.raises(ValueError, match=r"holds validation-2.png, .*: choose another folder$"):
        Run(settings(**inside))
    (tmp_path / "out" / "unet").mkdir()
    with pytest.raises(ValueError, match=r"holds unet, .*: choose another folder$"):
        Run(latest)
    (tmp_path / "out" / "checkpoint-1").mkdir()
    with pytest.raises(ValueError, match=r"or go on with its .* by --resume_from_checkpoint latest$"):
        Run(settings(**inside))


def test_checkpoints_hold_what_is_trained_alone(settings):
    config = settings(rank=2, train_text_encoder=True, with_prior_preservation=False)
    folder = Run(config).train()
    lora = load_file(folder / "pytorch_lora_weights.safetensors")
    held = [load_file(path) for path in sorted(list_checkpoints(folder)[-1].glob("model*.safetensors"))]
    assert sorted(w.numel() for part in held for w in part.values()) == sorted(
        w.numel() for w in lora.values()
    )


@pytest.mark.parametrize(("eight_bits", "rank"), [(False, None), (True, None), (True, 4)])
def test_room_is_asked_for_by_the_optimizer_that_runs(settings, monkeypatch, eight_bits, rank):
    """The model in float32, and in a checkpoint what is trained and two moments of 4 bytes or of 1."""
    config = settings(use_8bit_adam=False, rank=rank)
    run = Run(config)
    run.eight_bits = eight_bits
    run.pipe = models.load_source(config)
    run.modules = models.make_trainable(run.pipe, config)
    trained = sum(p.numel() for p in models.trained_in(run.modules))
    parts = [run.pipe.unet, run.pipe.vae, run.pipe.text_encoder] if rank is None else []
    model = 4 * sum(p.numel() for part in parts for p in part.parameters())
    told = {}
    monkeypatch.setattr(training, "check_space", lambda *args: told.update(args=args))
    run._check_space()
    sizes = [p.numel() for p in models.trained_in(run.modules)]
    moments = 8 * trained
    if eight_bits:
        moments = sum(2 * n + 8 * -(-n // 256) if n >= 4096 else 8 * n for n in sizes)
    assert told["args"] == (config.output_dir, model, 4 * trained + moments, 2, 3)
    for step, every, to_come in ((2, 2, 1), (1, 2, 2), (3, 1, 0), (0, 4, 1)):  # of three steps
        run.step, run.config = step, config.model_copy(update={"checkpointing_steps": every})
        run._check_space()
        assert told["args"][-1] == to_come


@pytest.mark.parametrize(
    ("there", "limit", "to_come", "more"),
    [(0, 2, 5, 3), (2, 2, 5, 1), (1, 2, 5, 2), (4, 2, 5, 1), (0, 2, 1, 1), (2, 2, 0, 0), (3, 0, 5, 5)],
)
def test_room_is_asked_for_checkpoints_that_are_not_there(tmp_path, monkeypatch, there, limit, to_come, more):
    """At most one beyond the limit is there at a time; 0 keeps all."""
    usage = namedtuple("Usage", "total used free")
    for step in range(there):
        (tmp_path / f"checkpoint-{step}").mkdir()
    for free in (1000 + 10 * more - 1, 1000 + 10 * more):
        monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda _, free=free: usage(0, 0, free))
        with nullcontext() if free % 10 == 0 else pytest.raises(OSError, match="make room"):
            checkpoints.check_space(tmp_path, 1000, 10, limit, to_come)


def test_all_checkpoints_are_kept_at_wish(settings):
    folder = Run(settings(checkpoints_total_limit=0, with_prior_preservation=False)).train()
    assert [path.name for path in list_checkpoints(folder)] == [f"checkpoint-{n}" for n in (1, 2, 3)]


def test_a_full_disk_is_told_before_class_images(settings, monkeypatch):
    usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda _: usage(0, 0, 1000))
    with pytest.raises(
        OSError, match=r"has 0\.0 GB free, and the run needs .* GB for the model and its checkpoints"
    ):
        Run(settings()).train()
    assert not settings().class_data_dir.exists()


def test_moments_of_8_bits():
    """By hand: a byte a number and 4 a block of 256, twice; small tensors stay in float32."""
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (5000, 100)]
    assert moment_bytes(parameters, eight_bits=True) == 2 * (5000 + 20 * 4) + 800
    assert moment_bytes(parameters, eight_bits=False) == 8 * 5100


CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize(
    ("asked", "device", "there", "expected"),
    [
        (None, CUDA, True, True),
        (None, CUDA, False, "needs bitsandbytes: pip install bitsandbytes, or pass --no_use_8bit_adam"),
        (None, CPU, False, False),
        (False, CUDA, False, False),
        (True, CPU, True, "needs a CUDA device, this is cpu: pass --no_use_8bit_adam"),
    ],
)
def test_8_bits_are_the_default_on_cuda(settings, monkeypatch, asked, device, there, expected):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if there else None)
    config = settings(use_8bit_adam=asked)
    if isinstance(expected, bool):
        assert in_8_bits(config, device) is expected
    else:
        with pytest.raises(ValueError, match=expected):
            in_8_bits(config, device)


def test_processes_wait_a_day_for_one_that_draws(settings):
    run = Run(settings())
    assert run.accelerator.init_handler.timeout.days == 1
    assert run.accelerator.autocast_handler.cache_enabled is False
