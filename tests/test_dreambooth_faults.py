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
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from diffusers import DiffusionPipeline
from dreamboothing import checkpoints_in, equal, start, train, weights
from hub import stand_in
from huggingface_hub import ModelCard
from PIL import Image
from safetensors.torch import load_file

from agentsd.dreambooth import checkpoints, images, inputs, models, results, training
from agentsd.dreambooth.data import image_paths
from agentsd.dreambooth.optimizer import in_8_bits, moment_bytes

ALL = {  # that a run draws
    "with_prior_preservation": True,
    "sample_batch_size": 1,
    "max_train_steps": 3,
    "lr_scheduler": "constant_with_warmup",  # so that a resumed run has to know its rate
    "lr_warmup_steps": 4,
    "checkpointing_steps": 1,
    "validation_prompt": "a sks cat",
    "validation_steps": 2,
    "num_inference_steps": 1,
}


@pytest.fixture
def eventful(run_config):
    """Settings of a run of three steps that draws all that a run draws."""
    return partial(run_config, **ALL)


@pytest.fixture(scope="module")
def undisturbed(run_config_in, tmp_path_factory):
    """Weights of such a run that nothing happened to."""
    return weights(train(run_config_in(tmp_path_factory.mktemp("undisturbed"), **ALL)))


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
SOON = ("a class image", "a checkpoint", "the model's files")


def at_call(number, error, original):
    """The original, but for its call of that number, which fails; a disk is full when most is written."""
    calls = []

    def call(*args, **kwargs):
        calls.append(args)
        fails = len(calls) == number
        made = original(*args, **kwargs) if error is FULL or not fails else None
        if fails:
            raise error
        return made

    return call


@pytest.mark.parametrize(
    "stage", [pytest.param(s, marks=() if s in SOON else pytest.mark.slow) for s in STAGES]
)
def test_a_run_that_died_goes_on_to_the_same_weights(eventful, undisturbed, tmp_path, monkeypatch, stage):
    place, name, number, error = STAGES[stage]
    config = eventful(resume_from_checkpoint="latest")
    monkeypatch.setattr(place, name, at_call(number, error, getattr(place, name)))
    with pytest.raises(type(error)):
        train(config)
    monkeypatch.undo()
    if stage == "the grid":  # all is there
        assert equal(weights(config.output_dir), undisturbed)
    folder = train(config)
    assert equal(weights(folder), undisturbed)
    assert {path.name for path in folder.iterdir()} >= {"model_index.json", "agentsd.json", "grid.png"}
    assert not list(folder.glob(".partial-model"))
    assert not list(folder.rglob("*.pkl"))  # which would be unpickled
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
def test_a_killed_command_goes_on_to_the_same_weights(eventful, undisturbed, tmp_path, sign):
    """By SIGKILL, when a file appears."""
    config = eventful(resume_from_checkpoint="latest", report_to="none")
    (tmp_path / "run.yaml").write_text(config.model_dump_json(exclude_none=True))
    words = [sys.executable, "-m", "agentsd.dreambooth", "--config", str(tmp_path / "run.yaml")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(words, env=environment)
    while run.poll() is None and not (tmp_path / sign).exists():
        time.sleep(0.001)
    run.kill()
    assert run.wait() != 0
    subprocess.run(words, check=True, env=environment)
    assert equal(weights(tmp_path / "out"), undisturbed)


def test_what_is_drawn_told_or_uploaded_may_fail(eventful, monkeypatch, caplog):
    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    stand_in(monkeypatch, upload=fail)
    monkeypatch.setattr(results, "generate", fail)
    monkeypatch.setattr(Accelerator, "log", fail)
    with caplog.at_level(logging.WARNING, logger="agentsd"):
        folder = train(eventful(with_prior_preservation=False, push_to_hub=True))
    for what in ("validation", "drawing grid.png", "the tracker", "the upload to me/out"):
        assert f"{what} failed, and the run goes on: OutOfMemoryError: CUDA out of memory" in caplog.text
    assert (folder / "unet").exists()


def test_the_model_is_uploaded_without_checkpoints(run_config, monkeypatch):
    given = {}
    stand_in(monkeypatch, upload=given.update)
    config = run_config(push_to_hub=True, hub_token="secret")
    folder = train(config)
    assert (given["repo_id"], given["token"], given["folder_path"]) == ("me/out", "secret", folder)
    assert given["ignore_patterns"] == ["checkpoint-*", ".*", "logs/*"]
    readme = (folder / "README.md").read_text()
    card = ModelCard(readme).data
    assert (card.library_name, card.instance_prompt, card.base_model) == ("diffusers", "a sks cat", None)
    assert "lora" not in card.tags
    assert config.pretrained_model_name_or_path not in readme
    kept = [path.read_text() for path in folder.rglob("*.json")]
    assert not any("secret" in text for text in (*kept, readme, repr(config)))


def test_the_card_names_the_base_model(run_config, monkeypatch):
    stand_in(monkeypatch)
    config = run_config(pretrained_model_name_or_path="runwayml/sd", rank=4)
    card = results._model_card(config, "me/out").data
    assert card.base_model == "runwayml/sd"
    assert {"text-to-image", "dreambooth", "lora"} <= {*card.tags}


def test_a_hub_that_refuses_is_told_before_the_run(run_config, monkeypatch):
    def refuse(*args, **kwargs):
        raise ConnectionError("no\nroute")

    monkeypatch.setattr("huggingface_hub.create_repo", refuse)
    with pytest.raises(ValueError, match="push_to_hub: ConnectionError: no route; log in by `hf auth login`"):
        start(run_config(push_to_hub=True))


OTHER = {  # changes of a run that goes on, and what is said of them; None where it may
    "as resolved": ({"learning_rate": 1e-6, "mixed_precision": "no", "use_8bit_adam": None}, None),
    "what no step depends on": ({"validation_prompt": "a cat", "gradient_checkpointing": True}, None),
    "longer": ({"max_train_steps": 9}, None),
    "fewer class images": ({"num_class_images": 2}, None),
    "more class images": ({"num_class_images": 4}, ": num_class_images was 3, is 4;"),
    "several": (
        {"apply": "none", "learning_rate": 2e-3, "instance_prompt": "a sks dog"},
        ": instance_prompt was 'a sks cat', is 'a sks dog'; learning_rate was 1e-06, is 0.002; apply was",
    ),
    "a schedule": ({"lr_scheduler": "linear"}, ": lr_scheduler was 'constant_with_warmup', is 'linear';"),
    "precision": ({"mixed_precision": "bf16"}, ": mixed_precision was 'no', is 'bf16'"),
    "another image": ({"instance_data_dir": "more"}, ": instance_images was '9 images ("),
}
ONE_STEP = ALL | {"learning_rate": None, "max_train_steps": 1}


@pytest.fixture(scope="module")
def one_step(run_config_in, photographs, tmp_path_factory):
    """Where a run of a step is kept, and more images than it had."""
    folder = tmp_path_factory.mktemp("one")
    train(run_config_in(folder, **ONE_STEP))
    shutil.copytree(photographs, folder / "more")
    shutil.copy(photographs / "0.png", folder / "more" / "10.png")
    return folder


@pytest.mark.parametrize("case", OTHER)
def test_other_settings_are_named_and_refused(run_config_in, one_step, monkeypatch, case):
    changes, told = OTHER[case]
    monkeypatch.chdir(one_step)
    resumed = {"output_dir": "out", "resume_from_checkpoint": "latest"}
    config = run_config_in(one_step, **ONE_STEP | resumed | changes)
    if told is None:
        assert start(config).resume.name == "checkpoint-1"
    else:
        with pytest.raises(ValueError, match=re.escape(f"other settings{told}")):
            start(config)


def test_a_schedule_that_decays_keeps_its_length(run_config):
    folder = train(run_config(lr_scheduler="linear"))
    resumed = {"max_train_steps": 3, "resume_from_checkpoint": str(folder / "checkpoint-2")}
    longer = run_config(lr_scheduler="linear", **resumed)
    told = r"was 2, is 3 \(max_train_steps may change under --lr_scheduler constant or"
    with pytest.raises(ValueError, match=told):
        start(longer)
    (folder / "checkpoint-2" / "settings.json").write_text("{")
    with pytest.raises(ValueError, match=r"checkpoint-2 has no readable settings.json"):
        start(longer)


def test_devices_count_among_the_settings(run_config):
    """Two halve a learning rate that is scaled: all the same, batches are others."""
    scaled = run_config(scale_lr=True, lr_scheduler="linear", max_train_steps=None, num_train_epochs=4)
    paths = sorted(scaled.instance_data_dir.iterdir())
    one, two = (checkpoints.resolve_settings(scaled, paths, [], False, n) for n in (1, 2))
    differ = {name: (one[name], two[name]) for name in one if one[name] != two[name]}
    assert differ == {"learning_rate": (1e-3, 2e-3), "max_train_steps": (36, 20), "processes": (1, 2)}


def test_a_run_that_died_before_a_checkpoint_begins_anew(run_config, tmp_path):
    """Where nothing but its own is in the folder; nobody is sent to checkpoints that aren't there."""
    out = tmp_path / "out"
    first = run_config(class_data_dir=out / "class")
    latest = run_config(class_data_dir=out / "class", resume_from_checkpoint="latest")
    for own in ("validation-2.png", "logs", ".partial-1", "class"):
        (out / own).mkdir(parents=True)
    assert start(latest).resume is None
    with pytest.raises(ValueError, match=r"holds validation-2.png, .*: choose another folder$"):
        start(first)
    (out / "unet").mkdir()
    with pytest.raises(ValueError, match=r"holds unet, .*: choose another folder$"):
        start(latest)
    (out / "checkpoint-1").mkdir()
    with pytest.raises(ValueError, match=r"or go on with its .* by --resume_from_checkpoint latest$"):
        start(first)


def test_checkpoints_hold_what_is_trained_alone(run_config):
    folder = train(run_config(rank=2, train_text_encoder=True))
    lora = load_file(folder / "pytorch_lora_weights.safetensors")
    held = [load_file(path) for path in (folder / "checkpoint-2").glob("model*.safetensors")]
    sizes = [w.numel() for part in held for w in part.values()]
    assert sorted(sizes) == sorted(w.numel() for w in lora.values())


@pytest.mark.parametrize(("eight_bits", "rank"), [(False, None), (True, None), (True, 4)])
def test_room_is_asked_for_by_the_optimizer_that_runs(run_config, monkeypatch, eight_bits, rank):
    """For the model in float32, and in a checkpoint for what is trained and its moments."""
    config = run_config(rank=rank, max_train_steps=3, checkpointing_steps=1)
    run = start(config)
    run.eight_bits = eight_bits
    run.pipe = models.load_source(config)
    run.modules = models.make_trainable(run.pipe, config)
    asked = []
    monkeypatch.setattr(training, "check_space", lambda *args: asked.append(args))
    run._check_space()
    trained = models.trained_in(run.modules)
    parts = [run.pipe.unet, run.pipe.vae, run.pipe.text_encoder] if rank is None else []
    model = 4 * sum(p.numel() for part in parts for p in part.parameters())
    checkpoint = 4 * sum(p.numel() for p in trained) + moment_bytes(trained, eight_bits)
    assert asked == [(config.output_dir, model, checkpoint, 2, 3)]
    for step, every, to_come in ((2, 2, 1), (1, 2, 2), (3, 2, 0), (0, 4, 1)):  # of three steps
        run.step, run.config = step, config.model_copy(update={"checkpointing_steps": every})
        run._check_space()
        assert asked[-1][-1] == to_come


def has_free(monkeypatch, size):
    """A disk with so many bytes free."""
    usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda _: usage(0, 0, size))


@pytest.mark.parametrize(
    ("there", "limit", "to_come", "more"),
    [(0, 2, 5, 3), (2, 2, 5, 1), (1, 2, 5, 2), (4, 2, 5, 1), (0, 2, 1, 1), (2, 2, 0, 0), (3, 0, 5, 5)],
)
def test_room_is_asked_for_checkpoints_that_are_not_there(tmp_path, monkeypatch, there, limit, to_come, more):
    """At most one beyond the limit is there at a time; 0 keeps all."""
    for step in range(there):
        (tmp_path / f"checkpoint-{step}").mkdir()
    needed = 1000 + 10 * more
    for free in (needed - 1, needed):
        has_free(monkeypatch, free)
        with nullcontext() if free == needed else pytest.raises(OSError, match="make room"):
            checkpoints.check_space(tmp_path, 1000, 10, limit, to_come)


def test_a_full_disk_is_told_before_class_images(eventful, tmp_path, monkeypatch):
    has_free(monkeypatch, 1000)
    told = r"has 0\.0 GB free, and the run needs .* GB for the model and its checkpoints"
    with pytest.raises(OSError, match=told):
        train(eventful())
    assert not (tmp_path / "class").exists()


@pytest.mark.parametrize(("limit", "kept"), [(1, [3]), (2, [2, 3]), (0, [1, 2, 3])])
def test_the_newest_checkpoints_are_kept_and_all_at_wish(run_config, limit, kept):
    folder = train(run_config(max_train_steps=3, checkpointing_steps=1, checkpoints_total_limit=limit))
    assert checkpoints_in(folder) == [f"checkpoint-{step}" for step in kept]


def test_moments_of_8_bits():
    """By hand: a byte a number and 4 a block of 256, twice; small tensors stay in float32."""
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (5000, 100)]
    assert moment_bytes(parameters, eight_bits=True) == 2 * (5000 + 20 * 4) + 800
    assert moment_bytes(parameters, eight_bits=False) == 8 * 5100


@pytest.mark.parametrize(
    ("asked", "device", "there", "expected"),
    [
        (None, "cuda", True, True),
        (None, "cuda", False, "needs bitsandbytes: pip install bitsandbytes, or pass --no_use_8bit_adam"),
        (None, "cpu", False, False),
        (False, "cuda", False, False),
        (True, "cpu", True, "needs a CUDA device, this is cpu: pass --no_use_8bit_adam"),
    ],
)
def test_8_bits_are_the_default_on_cuda(run_config, monkeypatch, asked, device, there, expected):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if there else None)
    config, device = run_config(use_8bit_adam=asked), torch.device(device)
    if isinstance(expected, bool):
        assert in_8_bits(config, device) is expected
    else:
        with pytest.raises(ValueError, match=expected):
            in_8_bits(config, device)


def test_accelerate_waits_a_day_for_one_that_draws_and_copies_no_weights(run_config):
    accelerator = start(run_config()).accelerator
    assert accelerator.init_handler.timeout.days == 1
    assert accelerator.autocast_handler.cache_enabled is False
