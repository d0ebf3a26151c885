"""A DreamBooth run: trains, saves, resumes, and comes back as a pipeline."""

import errno

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from diffusers import DDIMScheduler, StableDiffusionPipeline
from PIL import Image
from random_state import untouched
from safetensors.torch import load_file
from tiny import call, make_unet

from agentsd import Agents, Recipe, apply_agentsd
from agentsd.dreambooth import training
from agentsd.dreambooth.checkpoints import find_checkpoint, list_checkpoints
from agentsd.dreambooth.config import DreamBoothConfig
from agentsd.dreambooth.models import KOHYA, LORA_LAYERS, add_lora
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

    def loss(*args, **settings):
        steps.append(torch.backends.cuda.cudnn_sdp_enabled())
        return diffusion_loss(*args, **settings) * (1.0 if len(steps) < 3 else torch.nan)

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


@pytest.mark.parametrize(("run", "asked"), [("bf16", "fp32"), ("no", "bf16"), ("bf16", None)])
def test_class_images_are_drawn_in_the_precision_asked_for(settings, model_folder, tmp_path, run, asked):
    """As a pipeline in that precision draws them, whatever that of the run."""
    more = {"class_data_dir": tmp_path / "classes", "class_prompt": "a cat", "num_class_images": 1}
    more |= {"with_prior_preservation": True, "max_train_steps": 1, "num_validation_images": 1}
    Run(settings(mixed_precision=run, prior_generation_precision=asked, **more)).train()
    pipe = StableDiffusionPipeline.from_pretrained(model_folder)
    pipe.to(torch.float32 if asked == "fp32" else torch.bfloat16)
    pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config, clip_sample=False)
    rng = torch.Generator().manual_seed(0)
    [expected] = pipe("a cat", num_inference_steps=2, guidance_scale=7.5, generator=rng).images
    made = Image.open(tmp_path / "classes" / "class-00000.png")
    assert (np.asarray(made) == np.asarray(expected)).all()


def test_images_are_drawn_without_dropout(settings, model_folder):
    """So that a validation after the last step shows what the grid of the saved model does."""
    more = {"rank": 2, "lora_dropout": 0.5, "train_text_encoder": True, "learning_rate": 0.3}
    more |= {"apply": "none", "validation_prompt": "a sks cat", "validation_steps": 1, "max_train_steps": 1}
    run = Run(settings(**more))
    folder = run.train()
    assert run.pipe.unet.training
    assert run.pipe.text_encoder.training  # again
    pipe = StableDiffusionPipeline.from_pretrained(model_folder)
    pipe.load_lora_weights(folder)
    pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config, clip_sample=False)
    rng = torch.Generator().manual_seed(0)
    [expected] = pipe("a sks cat", num_inference_steps=2, guidance_scale=7.5, generator=rng).images
    for name in ("validation-1.png", "grid.png"):
        made = np.asarray(Image.open(folder / name), dtype=float)[:, :32]
        assert np.abs(made - np.asarray(expected, dtype=float)).max() <= 1


def test_lora_layers_start_as_pefts():
    unet = make_unet()
    before = call(unet)
    with untouched():
        add_lora(unet, LORA_LAYERS["unet"], 4, 0.0, seed=0)
    drawn = torch.cat([w.detach().flatten() for name, w in unet.named_parameters() if "lora_A" in name])
    assert float(drawn.std()) == pytest.approx(1 / 4, rel=0.05)  # "gaussian": a deviation of 1 / rank
    assert torch.equal(call(unet), before)  # lora_B is zero


def test_lora_weights_load_in_both_forms(settings, model_folder, tmp_path):
    """Of U-Net and text encoder, and with dropout: a resumed run ends with the same."""
    config = settings(rank=2, train_text_encoder=True, lora_dropout=0.5, max_train_steps=1)
    Run(config).train()
    rest = {"max_train_steps": 2, "resume_from_checkpoint": "latest"}
    folder = Run(config.model_copy(update=rest)).train()
    assert not (folder / "unet").exists()
    at_once = {"max_train_steps": 2, "output_dir": tmp_path / "whole"}
    whole = Run(config.model_copy(update=at_once)).train()
    made = [load_file(path / "pytorch_lora_weights.safetensors") for path in (folder, whole)]
    assert equal(*made)
    assert {name.split(".")[0] for name in made[0]} == {"unet", "text_encoder"}

    def drawn(**where):
        pipe = StableDiffusionPipeline.from_pretrained(model_folder)
        if where:
            pipe.load_lora_weights(folder, **where)
        rng = torch.Generator().manual_seed(0)
        images = pipe("a sks cat", num_inference_steps=2, generator=rng, output_type="np").images
        return torch.from_numpy(images)

    before, ours, kohyas = drawn(), drawn(adapter_name="a"), drawn(weight_name=KOHYA)
    assert float((ours - before).abs().max()) > 1e-4
    torch.testing.assert_close(kohyas, ours, rtol=0, atol=1e-6)
    names = {name.split(".")[0].split("_down_blocks_0_")[0] for name in load_file(folder / KOHYA)}
    assert {"lora_unet", "lora_te_text_model_encoder_layers_0_self_attn_k_proj"} <= names


def test_validation_images_are_of_one_seed_each(settings):
    """Beside those of diffusers' pipeline, drawn one by one."""
    config = settings(apply="none", seed=5, validation_prompt="a sks cat", validation_steps=2)
    folder = Run(config).train()
    pipe = StableDiffusionPipeline.from_pretrained(folder)
    pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config, clip_sample=False)
    for name in ("validation-2.png", "grid.png"):
        grid = np.asarray(Image.open(folder / name))
        for i, seed in enumerate((5, 6)):
            rng = torch.Generator().manual_seed(seed)
            [image] = pipe("a sks cat", num_inference_steps=2, guidance_scale=7.5, generator=rng).images
            assert (grid[:, 32 * i : 32 * (i + 1)] == np.asarray(image)).all()


def test_passes_are_counted_as_diffusers_does(settings):
    """Seven images in batches of two on two devices are 2 batches, of three 1 step: by hand."""
    config = settings(max_train_steps=None, num_train_epochs=5, train_batch_size=2)
    assert config.steps(7, processes=2) == 10
    assert config.model_copy(update={"gradient_accumulation_steps": 3}).steps(7, processes=2) == 5
    assert settings(num_train_epochs=5).steps(7, processes=1) == 2  # max_train_steps
    assert settings(max_train_steps=None).steps(7, processes=1) == 800
    scaled = settings(scale_lr=True, train_batch_size=2, gradient_accumulation_steps=3)
    assert scaled.rate(processes=4) == pytest.approx(1e-3 * 24)
    assert settings(learning_rate=None).rate(1) == 1e-6
    assert settings(learning_rate=None, rank=4).rate(1) == 1e-4


def test_epochs_decide_when_to_stop_and_to_validate(settings):
    more = {"num_train_epochs": 2, "validation_epochs": 1, "validation_prompt": "a cat"}
    folder = Run(settings(max_train_steps=None, **more)).train()  # three images: three steps a pass
    assert {path.name for path in folder.glob("validation-*")} == {"validation-3.png", "validation-6.png"}
    assert [path.name for path in list_checkpoints(folder)] == ["checkpoint-6"]


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
