"""DreamBooth's optimizer steps, against a loop by hand in float64; run as a script, one of two processes."""

import os
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import diffusers
import pytest
import torch
from devices import LikeMPS
from dreamboothing import train, weights
from PIL import Image
from random_state import untouched
from tiny import BETAS, make_unet

from agentsd import apply_agentsd
from agentsd.dreambooth.config import DreamBoothConfig
from agentsd.dreambooth.data import SubjectImages, load_image
from agentsd.dreambooth.inputs import make_inputs
from agentsd.dreambooth.step import TARGETS, diffusion_loss
from agentsd.dreambooth.training import Run

FOLLOWED = {
    "apply": "none",
    "resolution": 32,
    "learning_rate": 0.1,
    "lr_scheduler": "linear",  # 0.1, then 0.05
    "adam_epsilon": 1.0,  # with which a weight moves in proportion to its gradient
    "adam_beta1": 0.8,
    "adam_beta2": 0.9,
    "adam_weight_decay": 0.02,
    "seed": 3,
    "num_inference_steps": 1,
}


@pytest.fixture
def by_hand(run_config, make_pipeline, tmp_path):
    """Settings of a run, on a model of a prediction type, that can be followed by hand."""
    (tmp_path / "class").mkdir()
    for i in range(3):
        Image.effect_noise((40, 32), 100).convert("RGB").save(tmp_path / "class" / f"{i}.png")

    def make(kind="epsilon", **changes):
        schedule = diffusers.PNDMScheduler(**BETAS, steps_offset=1, prediction_type=kind)
        make_pipeline(scheduler=schedule).save_pretrained(tmp_path / "model")
        return run_config(**FOLLOWED | {"pretrained_model_name_or_path": str(tmp_path / "model")} | changes)

    return make


def batches_of(config, pipe, process=0, processes=1):
    """The run's images, from which batch n of a process is drawn."""
    like = {"padding": "max_length", "max_length": pipe.tokenizer.model_max_length, "return_tensors": "pt"}
    folders = (config.instance_data_dir, config.class_data_dir)
    instance, classes = (sorted(folder.glob("*.png")) for folder in folders)
    return SubjectImages(
        instance,
        classes if config.with_prior_preservation else [],
        pipe.tokenizer(config.instance_prompt, **like).input_ids,
        pipe.tokenizer(config.class_prompt, **like).input_ids,
        partial(load_image, resolution=32),
        config.train_batch_size,
        config.seed,
        process,
        processes,
        not config.center_crop,
    )


def loss_by_hand(batch, config, pipe, kind):
    """Eq. 2 of DreamBooth with Min-SNR weights (Hang et al. 2023), in float64."""
    rng = torch.Generator().manual_seed(batch.seed)
    mean, log_variance = pipe.vae.encode(batch.images.double()).latent_dist.parameters.chunk(2, 1)
    drawn = torch.randn(mean.shape, generator=rng).double()
    latents = 0.18215 * (mean + torch.exp(log_variance / 2) * drawn)  # Stable Diffusion's factor
    noise = torch.randn(mean.shape, generator=rng).double()
    steps = torch.randint(1000, (len(latents),), generator=rng)
    if config.offset_noise:
        noise = noise + 0.1 * torch.randn((len(latents), 4, 1, 1), generator=rng).double()
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float32) ** 2  # as models have them
    signal = torch.cumprod(1 - betas, 0).double()
    losses = []
    text = pipe.text_encoder(batch.text)[0]
    for i, t in enumerate(steps.tolist()):
        a, b = signal[t].sqrt(), (1 - signal[t]).sqrt()
        predicted = pipe.unet((a * latents[i] + b * noise[i])[None], t, text[i : i + 1]).sample[0]
        velocity = a * noise[i] - b * latents[i]
        right = {"epsilon": noise[i], "v_prediction": velocity, "sample": latents[i]}[kind]
        weight = 1.0
        if config.snr_gamma is not None:
            snr = float(a**2 / b**2)
            of_kind = {"epsilon": 1 / snr, "v_prediction": 1 / (snr + 1), "sample": 1.0}[kind]
            weight = min(snr, config.snr_gamma) * of_kind
        losses.append(weight * ((predicted - right) ** 2).sum() / right.numel())
    if not config.with_prior_preservation:
        return sum(losses) / len(losses)
    half = len(losses) // 2
    return (sum(losses[:half]) + config.prior_loss_weight * sum(losses[half:])) / half


def train_by_hand(config, kind, processes=1):
    """Trained weights of the U-Net: AdamW on the mean gradient of a step's batches, scaled to the norm."""
    pipe = diffusers.StableDiffusionPipeline.from_pretrained(config.pretrained_model_name_or_path)
    every = [batches_of(config, pipe, process, processes) for process in range(processes)]
    for part in (pipe.vae, pipe.text_encoder, pipe.unet):
        part.double().requires_grad_(part is pipe.unet)
    weights = dict(pipe.unet.named_parameters())
    state = {name: (0.0, 0.0) for name in weights}
    parts = config.gradient_accumulation_steps
    for step in range(2):
        rate = config.learning_rate * (1 - step / 2)
        found = [images[step * parts + part] for images in every for part in range(parts)]
        loss = sum(loss_by_hand(batch, config, pipe, kind) for batch in found) / len(found)
        gradients = torch.autograd.grad(loss, list(weights.values()))
        norm = sum(float((g**2).sum()) for g in gradients) ** 0.5
        for (name, weight), g in zip(weights.items(), gradients, strict=True):
            g = g * min(1.0, config.max_grad_norm / norm)
            first, second = (0.8 * state[name][0] + 0.2 * g, 0.9 * state[name][1] + 0.1 * g**2)
            state[name] = first, second
            moved = (first / (1 - 0.8 ** (step + 1))) / ((second / (1 - 0.9 ** (step + 1))) ** 0.5 + 1.0)
            with torch.no_grad():
                weight.mul_(1 - rate * 0.02).sub_(rate * moved)
    return weights


def assert_trained_as(expected, config):
    """The weights of a run moved as those by hand, to a thousandth of how far they went."""
    made, before = weights(config.output_dir), weights(config.pretrained_model_name_or_path)
    expected = {name: weight.detach() for name, weight in expected.items()}
    far = max(float((expected[name] - before[name]).abs().max()) for name in expected)
    assert far > 1e-3
    apart = max(float((made[name].double() - expected[name]).abs().max()) for name in expected)
    assert apart < 1e-3 * far


CASES = {
    "noise": ("epsilon", {}),
    "velocity, Min-SNR": ("v_prediction", {"snr_gamma": 0.5, "train_batch_size": 2}),
    "samples, offset": ("sample", {"snr_gamma": 0.5, "offset_noise": True, "center_crop": True}),
    "prior, accumulation, clipped": (
        "epsilon",
        {
            "with_prior_preservation": True,
            "prior_loss_weight": 0.3,
            "gradient_accumulation_steps": 2,
            "snr_gamma": 5,
            "max_grad_norm": 0.5,
            "dataloader_num_workers": 1,
        },
    ),
    "encoded ahead": (
        "epsilon",
        {
            "with_prior_preservation": True,
            "center_crop": True,
            "cache_latents": True,
            "pre_compute_text_embeddings": True,
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_two_steps_are_those_of_a_loop_by_hand(by_hand, case):
    kind, changes = CASES[case]
    config = by_hand(kind, **changes)
    with untouched():
        folder = train(config)
    assert_trained_as(train_by_hand(config, kind), config)
    assert (folder / "grid.png").exists()  # for which what was encoded ahead is back on the device


def test_each_process_has_batches_of_its_own(run_config, make_pipeline):
    config, pipe, seeds = run_config(), make_pipeline(), []
    for process in (0, 1):
        of = SimpleNamespace(process_index=process, num_processes=2, device=torch.device("cpu"))
        images = make_inputs(pipe, config, of, sorted(config.instance_data_dir.iterdir()), [])
        seeds += [images[number].seed for number in range(4)]
    assert len(set(seeds)) == 8


@pytest.mark.slow
def test_two_processes_train_on_the_mean_of_their_gradients(by_hand, tmp_path):
    """By gloo; and draw the class images that one process draws."""
    config = by_hand(with_prior_preservation=True, gradient_accumulation_steps=2, num_class_images=6)
    (tmp_path / "run.json").write_text(config.model_dump_json())
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", __file__]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    subprocess.run([sys.executable, *launch, tmp_path / "run.json"], check=True, env=environment)
    names = {path.name for path in (tmp_path / "class").iterdir()}
    assert names == {f"{n}.png" for n in range(3)} | {f"class-{n:05d}.png" for n in range(3)}
    assert_trained_as(train_by_hand(config, "epsilon", processes=2), config)


@pytest.mark.parametrize("kind", TARGETS)
def test_the_users_default_device_changes_no_loss(kind):
    schedule = diffusers.DDPMScheduler(**BETAS, prediction_type=kind)
    latents = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    unet, losses = lambda noisy, steps, text: SimpleNamespace(sample=noisy), []
    for around in (torch.device("cpu"), torch.device("meta")):
        with around:
            rng = torch.Generator("cpu").manual_seed(1)
            losses.append(diffusion_loss(unet, schedule, latents, latents, rng, offset_noise=True))
    assert torch.equal(*losses)


def test_a_step_runs_where_there_is_no_float64(run_config):
    """Forward and backward of agent attention in training, as on a Mac."""
    apply_agentsd(unet := make_unet().train(), recipe=run_config().recipe)
    schedule = diffusers.DDPMScheduler(**BETAS, prediction_type="v_prediction")
    found, text, latents = [], torch.ones(2, 3, 16), torch.ones(2, 4, 16, 16)
    for around in (nullcontext, LikeMPS):
        unet.zero_grad()
        with around():
            rng = torch.Generator("cpu").manual_seed(1)
            loss = diffusion_loss(unet, schedule, latents, text, rng, snr_gamma=5)
            loss.backward()
        found.append((loss.detach(), unet.conv_in.weight.grad.clone()))
    for made, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(made, expected, rtol=1e-3, atol=1e-4)


if __name__ == "__main__":
    Run(DreamBoothConfig.model_validate_json(Path(sys.argv[1]).read_text())).train()
