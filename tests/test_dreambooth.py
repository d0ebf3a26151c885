"""A DreamBooth run: trains, draws, saves, and comes back as a pipeline."""

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline
from dreamboothing import checkpoints_in, drawn_by, equal, start, train, weights
from PIL import Image
from random_state import untouched
from safetensors.torch import load_file
from tiny import call, make_unet

from agentsd import Agents, Recipe, apply_agentsd
from agentsd.dreambooth import training
from agentsd.dreambooth.models import KOHYA, LORA_LAYERS, add_lora
from agentsd.dreambooth.step import diffusion_loss
from agentsd.modules import AgentModule

IN_EVERY_STEP = Recipe(
    Agents(at_most=None, agent_ratio=0.95, ranking="layer", destinations="random"), levels=1
)  # as the paper trains
VALIDATION = {"validation_prompt": "a sks cat", "validation_steps": 2}


def test_the_three_ways_to_apply_differ_as_they_should(run_config, model_folder, tmp_path):
    made, grids = {}, {}
    for apply in ("train+generate", "generate", "none"):
        out = tmp_path / apply
        with untouched():  # the user's random state
            train(run_config(apply=apply, output_dir=out, **VALIDATION))
        made[apply], grids[apply] = weights(out), (out / "grid.png").read_bytes()
        assert (out / "validation-2.png").exists()
        assert (out / "agentsd.json").exists() == (apply != "none")
    assert equal(made["generate"], made["none"])
    assert not equal(made["generate"], weights(model_folder))
    assert not equal(made["generate"], made["train+generate"])
    assert grids["generate"] != grids["none"]
    folder = tmp_path / "train+generate"
    pipe = StableDiffusionPipeline.from_pretrained(folder)
    assert apply_agentsd(pipe, recipe=folder).recipe == IN_EVERY_STEP


def test_gradients_that_are_not_finite_end_the_run(run_config, monkeypatch):
    """As cuDNN's attention gives them on an H200: it is off, and the checkpoint before stays good."""
    enabled = []

    def loss(*args, **settings):
        enabled.append(torch.backends.cuda.cudnn_sdp_enabled())
        return diffusion_loss(*args, **settings) * (1.0 if len(enabled) < 3 else torch.nan)

    monkeypatch.setattr(training, "diffusion_loss", loss)
    config = run_config(max_train_steps=4, checkpointing_steps=2)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    told = r"step 3 are not finite: their norm is nan.*mixed_precision"
    with pytest.raises(FloatingPointError, match=told):
        train(config)
    assert enabled == [False] * 3
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
    assert checkpoints_in(config.output_dir) == ["checkpoint-2"]


def test_the_text_encoder_trains_too_in_half_precision(run_config, model_folder):
    more = {"with_prior_preservation": True, "gradient_checkpointing": True, "mixed_precision": "bf16"}
    more |= {"gradient_accumulation_steps": 2, "train_text_encoder": True, "max_train_steps": 1}
    folder = train(run_config(**more))
    assert {w.dtype for w in weights(folder).values()} == {torch.float32}
    assert not equal(weights(folder, "text_encoder"), weights(model_folder, "text_encoder"))


@pytest.mark.parametrize(("run", "asked"), [("bf16", "fp32"), ("no", "bf16"), ("bf16", None)])
def test_class_images_are_drawn_in_the_precision_asked_for(run_config, model_folder, tmp_path, run, asked):
    more = {"with_prior_preservation": True, "num_class_images": 1, "max_train_steps": 1}
    train(run_config(mixed_precision=run, prior_generation_precision=asked, **more))
    pipe = StableDiffusionPipeline.from_pretrained(model_folder)
    pipe.to(torch.float32 if asked == "fp32" else torch.bfloat16)
    made = np.asarray(Image.open(tmp_path / "class" / "class-00000.png"))
    assert np.array_equal(made, drawn_by(pipe, "a cat"))


def test_images_are_drawn_without_dropout(run_config, model_folder):
    """So that a validation after the last step shows what the grid of the saved model does."""
    more = {"rank": 2, "lora_dropout": 0.5, "train_text_encoder": True, "learning_rate": 0.3}
    more |= {"apply": "none", "validation_prompt": "a sks cat", "validation_steps": 1, "max_train_steps": 1}
    run = start(run_config(**more))
    folder = run.train()
    assert run.pipe.unet.training
    assert run.pipe.text_encoder.training  # again
    pipe = StableDiffusionPipeline.from_pretrained(model_folder)
    pipe.load_lora_weights(folder)
    expected = drawn_by(pipe).astype(float)
    for name in ("validation-1.png", "grid.png"):
        assert np.abs(np.asarray(Image.open(folder / name)) - expected).max() <= 1


def test_lora_layers_start_as_pefts():
    unet = make_unet()
    before = call(unet)
    with untouched():
        add_lora(unet, LORA_LAYERS["unet"], 4, 0.0, seed=0)
    drawn = torch.cat([w.detach().flatten() for name, w in unet.named_parameters() if "lora_A" in name])
    assert float(drawn.std()) == pytest.approx(1 / 4, rel=0.05)  # "gaussian": a deviation of 1 / rank
    assert torch.equal(call(unet), before)  # lora_B is zero


def test_lora_weights_load_in_both_forms(run_config, model_folder, tmp_path):
    """Of U-Net and text encoder, and with dropout: a resumed run ends with the same."""
    more = {"rank": 2, "train_text_encoder": True, "lora_dropout": 0.5}
    train(run_config(max_train_steps=1, **more))
    folder = train(run_config(resume_from_checkpoint="latest", **more))
    whole = train(run_config(output_dir=tmp_path / "whole", **more))
    made = [load_file(path / "pytorch_lora_weights.safetensors") for path in (folder, whole)]
    assert equal(*made)
    assert {name.split(".")[0] for name in made[0]} == {"unet", "text_encoder"}
    assert not (folder / "unet").exists()

    def drawn(**where):
        pipe = StableDiffusionPipeline.from_pretrained(model_folder)
        if where:
            pipe.load_lora_weights(folder, **where)
        rng = torch.Generator().manual_seed(0)
        return pipe("a sks cat", num_inference_steps=2, generator=rng, output_type="np").images

    before, ours, kohyas = drawn(), drawn(adapter_name="a"), drawn(weight_name=KOHYA)
    assert np.abs(ours - before).max() > 1e-4
    np.testing.assert_allclose(kohyas, ours, rtol=0, atol=1e-6)
    names = {name.split(".")[0].split("_down_blocks_0_")[0] for name in load_file(folder / KOHYA)}
    assert {"lora_unet", "lora_te_text_model_encoder_layers_0_self_attn_k_proj"} <= names


def test_validation_images_are_of_one_seed_each(run_config):
    """Beside those of diffusers' pipeline, drawn one by one."""
    folder = train(run_config(apply="none", seed=5, num_validation_images=2, **VALIDATION))
    pipe = StableDiffusionPipeline.from_pretrained(folder)
    expected = np.hstack([drawn_by(pipe, seed=seed) for seed in (5, 6)])
    for name in ("validation-2.png", "grid.png"):
        assert np.array_equal(np.asarray(Image.open(folder / name)), expected)


def test_passes_are_counted_as_diffusers_does(run_config):
    """Seven images in batches of two on two devices are 2 batches, of three 1 step: by hand."""
    batches = {"train_batch_size": 2, "num_train_epochs": 5, "max_train_steps": None}
    assert run_config(**batches).steps(7, processes=2) == 10
    assert run_config(**batches, gradient_accumulation_steps=3).steps(7, processes=2) == 5
    assert run_config(num_train_epochs=5).steps(7, processes=1) == 2  # max_train_steps
    assert run_config(max_train_steps=None).steps(7, processes=1) == 800
    scaled = run_config(scale_lr=True, train_batch_size=2, gradient_accumulation_steps=3)
    assert scaled.rate(processes=4) == pytest.approx(1e-3 * 24)
    assert run_config(learning_rate=None).rate(1) == 1e-6
    assert run_config(learning_rate=None, rank=4).rate(1) == 1e-4


def test_epochs_decide_when_to_stop_and_to_validate(run_config):
    more = {"num_train_epochs": 2, "validation_epochs": 1, "validation_prompt": "a cat"}
    folder = train(run_config(max_train_steps=None, train_batch_size=3, **more))
    # nine images: three steps a pass
    assert {path.name for path in folder.glob("validation-*")} == {"validation-3.png", "validation-6.png"}
    assert checkpoints_in(folder) == ["checkpoint-6"]


def test_trainable_attention_is_trained_and_comes_back(run_config, model_folder):
    with untouched():
        folder = train(run_config(attention="module"))
    recipe = Recipe(AgentModule(), levels=1)
    untrained = apply_agentsd(StableDiffusionPipeline.from_pretrained(model_folder), recipe=recipe)
    handle = apply_agentsd(StableDiffusionPipeline.from_pretrained(folder), recipe=folder)
    assert handle.recipe == recipe
    pairs = zip(handle.parameters(), untrained.parameters(), strict=True)
    assert not any(torch.equal(a, b) for a, b in pairs)
