"""DreamBooth's images, its loss, and the users' files that it leaves as they are."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import diffusers
import pytest
import torch
from accelerate.state import AcceleratorState
from devices import LikeMPS
from PIL import Image
from tiny import BETAS, make_unet, make_vae

from agentsd import Agents, Recipe, apply_agentsd
from agentsd.dreambooth.config import DreamBoothConfig
from agentsd.dreambooth.data import Batch, SubjectImages, find_images, image_paths
from agentsd.dreambooth.images import fill_class_folder
from agentsd.dreambooth.step import TARGETS, diffusion_loss
from agentsd.dreambooth.training import Run

AS_THE_PAPER_TRAINS = Recipe(
    Agents(at_most=None, agent_ratio=0.95, ranking="layer", destinations="random"), levels=1
)


@pytest.fixture
def settings(tmp_path):
    """Of a run whose photographs are grey."""
    AcceleratorState._reset_state(reset_partial_state=True)
    (tmp_path / "subject").mkdir()
    Image.new("RGB", (32, 32), "grey").save(tmp_path / "subject" / "one.png")
    return {
        "pretrained_model_name_or_path": "demo",
        "instance_data_dir": tmp_path / "subject",
        "instance_prompt": "a sks cat",
        "output_dir": tmp_path / "model",
        "class_data_dir": tmp_path / "class",
        "class_prompt": "a cat",
        "with_prior_preservation": True,
        "num_inference_steps": 1,
        "resolution": 32,
        "report_to": "none",
    }


@pytest.fixture
def folder(settings):
    """Where the class images are."""
    settings["class_data_dir"].mkdir()
    return settings["class_data_dir"]


class Painter:
    """In place of a pipeline: an image whose grey level is the seed."""

    def __init__(self):
        self.unet, self.scheduler = make_unet(), diffusers.DDIMScheduler(**BETAS)

    def __call__(self, prompt, generator, **settings):
        return type("Output", (), {"images": [grey(generator.initial_seed())]})()


def grey(level):
    return Image.new("RGB", (8, 8), (level,) * 3)


def levels(folder):
    return {path.name: Image.open(path).convert("L").getpixel((0, 0)) for path in image_paths(folder)}


def fill(settings, count):
    fill_class_folder(Painter(), DreamBoothConfig(**settings, num_class_images=count), lambda: None)


def test_a_class_folder_is_filled_and_nothing_is_written_over(settings, folder):
    fill(settings, 4)
    assert levels(folder) == {f"class-{n:05d}.png": n for n in range(4)}
    (folder / "class-00001.png").unlink()
    grey(77).save(folder / "class-00003.png")  # the user's own by now
    grey(88).save(folder / "mine.JPG", format="JPEG")
    fill(settings, 5)
    made = levels(folder)
    assert len(made) == 5
    assert made["class-00001.png"] == 1  # the one that lacked, from its own seed
    assert made["class-00003.png"] == 77
    fill(settings, 5)
    assert levels(folder) == made


def test_two_processes_fill_one_folder(settings, folder):
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: fill(settings, 6), range(2)))
    assert 6 <= len(levels(folder)) <= 7
    assert all(level == int(name[6:11]) for name, level in levels(folder).items())


def test_images_are_drawn_by_step(settings):
    ids = torch.zeros(1, 4, dtype=torch.int64)
    Image.new("RGB", (40, 32), "red").save(settings["instance_data_dir"] / "two.png")
    found = find_images(settings["instance_data_dir"])
    images = SubjectImages(found, found, ids, ids + 1, 16)
    a, b, *others = (images.draw(2, seed=0, step=step) for step in (5, 5, *range(6, 16)))
    assert torch.equal(a.pixels, b.pixels)
    assert a.pixels.shape == (4, 3, 16, 16)
    assert a.input_ids[:, 0].tolist() == [0, 0, 1, 1]
    assert not all(torch.equal(other.pixels, a.pixels) for other in others)


class Encoder(torch.nn.Module):
    """Latents that are the pixels' first channels."""

    device, dtype = torch.device("cpu"), torch.float32
    config = type("Config", (), {"scaling_factor": 1.0})

    def encode(self, pixels):
        latents = torch.cat([pixels, pixels[:, :1]], 1)
        latent_dist = type("Dist", (), {"sample": staticmethod(lambda generator: latents)})
        return type("Output", (), {"latent_dist": latent_dist})


@pytest.mark.parametrize("kind", TARGETS)
def test_what_a_model_predicts_is_what_it_is_trained_on(kind):
    """A model that gives the exact answer has no loss."""
    schedule = diffusers.DDPMScheduler(**BETAS, prediction_type=kind)
    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    latents, ids = torch.cat([pixels, pixels[:, :1]], 1), torch.zeros(2, 3, dtype=torch.int64)

    def exact(noisy, steps, text):
        alphas = schedule.alphas_cumprod[steps].view(-1, 1, 1, 1)
        noise = (noisy - alphas.sqrt() * latents) / (1 - alphas).sqrt()
        velocity = alphas.sqrt() * noise - (1 - alphas).sqrt() * latents
        answers = {"sample": latents, "epsilon": noise, "v_prediction": velocity}
        return type("Output", (), {"sample": answers[kind]})

    losses = []
    for around in (nullcontext(), torch.device("meta")):  # a default device of the user's
        with around:
            batch = Batch(pixels, ids, torch.Generator("cpu").manual_seed(1))
            losses.append(diffusion_loss(Encoder(), lambda ids: (ids.float(),), exact, schedule, batch, None))
    assert float(losses[0]) < 1e-6
    assert torch.equal(*losses)


def test_a_step_runs_where_there_is_no_float64():
    """Forward and backward of agent attention in training, as on a Mac."""
    apply_agentsd(unet := make_unet().train(), recipe=AS_THE_PAPER_TRAINS)
    schedule = diffusers.DDPMScheduler(**BETAS, prediction_type="v_prediction")
    found, text = [], torch.ones(2, 3, 16)
    for around in (nullcontext, LikeMPS):
        rng = torch.Generator("cpu").manual_seed(1)
        batch = Batch(torch.ones(2, 3, 16, 16), torch.ones(2, 3, dtype=torch.int64), rng)
        unet.zero_grad()
        with around():
            loss = diffusion_loss(Encoder(), lambda ids: (text,), unet, schedule, batch, None)
            loss.backward()
        found.append((loss.detach(), unet.conv_in.weight.grad.clone()))
    for made, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(made, expected, rtol=1e-3, atol=1e-4)


def test_prior_loss_is_the_class_images_share():
    """The loss is linear in the weight of the second half of the batch."""
    apply_agentsd(unet := make_unet().train(), recipe=AS_THE_PAPER_TRAINS)
    pixels = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(5))
    ids, text = torch.zeros(2, 7, dtype=torch.int64), torch.ones(2, 7, 16)
    parts = make_vae(), lambda ids: (text,), unet, diffusers.DDPMScheduler(**BETAS)
    at = []
    for prior in (0.0, 1.0, 3.0):
        batch = Batch(pixels, ids, torch.Generator().manual_seed(1))
        at.append(float(diffusion_loss(*parts, batch, prior).detach()))
    assert at[1] > at[0]
    assert at[2] - at[0] == pytest.approx(3 * (at[1] - at[0]), rel=1e-4)


def test_a_model_that_predicts_something_else_is_refused(settings, monkeypatch):
    def load(config):
        from agentsd.demo import load_pipeline

        pipe = load_pipeline()
        pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler()  # whose config has no prediction type
        return pipe

    monkeypatch.setattr("agentsd.dreambooth.training._source", load)
    with pytest.raises(ValueError, match="predicts 'flow_prediction', which is not trained here"):
        Run(DreamBoothConfig(**settings)).train()
    assert not list(settings["output_dir"].glob("*"))
    assert not settings["class_data_dir"].exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there half precision trains")
def test_half_precision_is_refused_where_nothing_scales_it(settings):
    with pytest.raises(ValueError, match="needs a CUDA device: pass 'bf16' or 'no'"):
        Run(DreamBoothConfig(**settings, mixed_precision="fp16"))
    assert not settings["output_dir"].exists()


def test_an_output_folder_with_something_in_it_is_refused(settings):
    settings["output_dir"].mkdir()
    (settings["output_dir"] / "model_index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"holds model_index\.json.*choose another folder"):
        Run(DreamBoothConfig(**settings))
    assert (settings["output_dir"] / "model_index.json").read_text() == "{}"
