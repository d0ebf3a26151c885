"""Faults that were found and mended: users' files, what is trained, devices in files, trained modules."""

import io
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import diffusers
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from agentsd_demo.pipeline_io import check_export
from agentsd_eval.errors import EvalError
from agentsd_eval.files import check_own_image, save_image
from devices import LikeMPS
from logs import logged, silent, warned
from PIL import Image
from tiny import BETAS, make_unet
from torch.nn.functional import interpolate

from agentsd import Agents, PooledAgents, Recipe, apply_agentsd
from agentsd.attention.pooling import agent_grid
from agentsd.modules import AgentModule, AttnZero, FocusedLinear
from agentsd.modules.agent import AgentAttention, resize_agents
from agentsd.modules.focused import FocusedLinearAttention
from agentsd.recipe import AGENTSD

dreambooth = pytest.importorskip("agentsd.dreambooth.config", reason="needs the extra `train`")
from agentsd.dreambooth.data import Batch, image_paths  # noqa: E402
from agentsd.dreambooth.images import fill_class_folder  # noqa: E402
from agentsd.dreambooth.step import TARGETS, diffusion_loss  # noqa: E402
from agentsd.dreambooth.training import Run  # noqa: E402


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
    }


class Painter:
    """In place of a pipeline: an image whose grey level is the seed."""

    def __init__(self, before=lambda: None):
        self.unet, self.before = make_unet(), before
        self.scheduler = diffusers.DDIMScheduler(**BETAS)

    def __call__(self, prompt, generator, **settings):
        self.before()
        image = Image.new("RGB", (8, 8), (generator.initial_seed(),) * 3)
        return type("Output", (), {"images": [image]})()


def levels(folder):
    return {path.name: Image.open(path).convert("L").getpixel((0, 0)) for path in image_paths(folder)}


def fill(settings, count, pipe=None):
    config = dreambooth.DreamBoothConfig(**settings, num_class_images=count)
    fill_class_folder(pipe or Painter(), config, lambda: None)


def test_a_class_folder_is_filled_and_nothing_is_written_over(settings):
    folder = settings["class_data_dir"]
    fill(settings, 4)
    assert levels(folder) == {f"class-{n:05d}.png": n for n in range(4)}
    (folder / "class-00001.png").unlink()
    Image.new("RGB", (8, 8), (77,) * 3).save(folder / "class-00003.png")  # the user's own by now
    Image.new("RGB", (8, 8), (88,) * 3).save(folder / "mine.JPG", format="JPEG")
    fill(settings, 5)
    made = levels(folder)
    assert len(made) == 5
    assert made["class-00001.png"] == 1  # the one that lacked, from its own seed
    assert made["class-00003.png"] == 77
    fill(settings, 5)
    assert levels(folder) == made


@pytest.mark.parametrize("suffix", [".jpg", ".JPEG", ".webp", ".bmp", ".PNG"])
def test_images_of_every_kind_count(settings, suffix):
    folder = settings["class_data_dir"]
    folder.mkdir()
    for n in range(3):
        Image.new("RGB", (8, 8)).save(folder / f"photo{n}{suffix}")
    fill(settings, 3)
    assert len(list(folder.iterdir())) == 3


def test_an_image_that_comes_while_one_is_drawn_stays(settings):
    folder = settings["class_data_dir"]

    def intrude():
        if not (folder / "class-00000.png").exists():
            Image.new("RGB", (8, 8), (99,) * 3).save(folder / "class-00000.png")

    fill(settings, 3, Painter(intrude))
    made = levels(folder)
    assert made["class-00000.png"] == 99
    assert sorted(made.values()) == [1, 2, 99]
    assert not [name for name in os.listdir(folder) if "partial" in name]


def test_a_link_that_leads_nowhere_is_gone_round(settings):
    folder = settings["class_data_dir"]
    folder.mkdir()
    (folder / "class-00000.png").symlink_to(folder / "nothing.txt")
    fill(settings, 2)
    assert (folder / "class-00000.png").is_symlink()
    assert (folder / "class-00001.png").exists()


def test_a_disk_that_is_full_leaves_no_half_image(settings, monkeypatch):
    folder = settings["class_data_dir"]
    fill(settings, 1)

    class Full(io.BytesIO):
        def getvalue(self):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("agentsd.dreambooth.images.io.BytesIO", Full)
    with pytest.raises(OSError, match="No space"):
        fill(settings, 2)
    assert list(levels(folder)) == ["class-00000.png"]


def test_two_processes_fill_one_folder(settings):
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: fill(settings, 6), range(2)))
    made = levels(settings["class_data_dir"])
    assert 6 <= len(made) <= 7
    assert all(level == int(name[6:11]) for name, level in made.items())


def test_an_output_folder_with_something_in_it_is_refused(settings):
    folder = settings["output_dir"]
    folder.mkdir()
    (folder / "model_index.json").write_text("{}")
    for resume in (None, "latest"):
        config = dreambooth.DreamBoothConfig(**settings, resume_from_checkpoint=resume)
        with pytest.raises(ValueError, match=r"holds model_index\.json.*choose another folder"):
            Run(config)
    assert (folder / "model_index.json").read_text() == "{}"


def test_a_recipe_is_not_written_over_another_file(tmp_path):
    notes = tmp_path / "notes.json"
    notes.write_text('{"shopping": ["milk"]}')
    with pytest.raises(FileExistsError, match=r"notes\.json is no recipe and stays as it is"):
        AGENTSD.save(notes)
    assert notes.read_text() == '{"shopping": ["milk"]}'
    mine = AGENTSD.save(tmp_path)
    Recipe(PooledAgents(4)).save(mine)  # one's own recipe may change
    assert Recipe.load(mine) == Recipe(PooledAgents(4))


def test_an_image_of_the_users_is_not_written_over(tmp_path):
    photo = tmp_path / "photo.png"
    Image.new("RGB", (8, 8)).save(photo)
    for path in (photo, tmp_path / "subject.txt"):
        path.touch()
        with pytest.raises(EvalError, match="was not made by this command and stays as it is"):
            check_own_image(path)
    save_image(Image.new("RGB", (8, 8)), tmp_path / "compared.png")
    check_own_image(tmp_path / "compared.png")
    check_own_image(tmp_path / "none.png")


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
    latents = torch.cat([pixels, pixels[:, :1]], 1)

    def exact(noisy, steps, text):
        alphas = schedule.alphas_cumprod[steps].view(-1, 1, 1, 1)
        noise = (noisy - alphas.sqrt() * latents) / (1 - alphas).sqrt()
        answers = {
            "sample": latents,
            "epsilon": noise,
            "v_prediction": alphas.sqrt() * noise - (1 - alphas).sqrt() * latents,
        }
        return type("Output", (), {"sample": answers[kind]})

    batch = Batch(pixels, torch.zeros(2, 3, dtype=torch.int64), torch.Generator().manual_seed(1))
    loss = diffusion_loss(Encoder(), lambda ids: (ids.float(),), exact, schedule, batch, None)
    assert float(loss) < 1e-6
    with torch.device("meta"):  # a default device of the user's
        rng = torch.Generator("cpu").manual_seed(1)
        again = diffusion_loss(
            Encoder(), lambda ids: (ids.float(),), exact, schedule, Batch(pixels, batch.input_ids, rng), None
        )
    assert torch.equal(again, loss)


@pytest.mark.parametrize("kind", TARGETS)
def test_a_step_runs_where_there_is_no_float64(kind):
    """Forward and backward of agent attention in training, as on a Mac."""
    unet = make_unet().train()
    apply_agentsd(unet, recipe=Recipe(Agents(0.4, at_most=None, agent_ratio=0.95, ranking="layer"), levels=1))
    schedule = diffusers.DDPMScheduler(**BETAS, prediction_type=kind)
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


def test_a_model_that_predicts_something_else_is_refused(settings, monkeypatch):
    def load(config):
        from agentsd.demo import load_pipeline

        pipe = load_pipeline()
        pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler()  # whose config has no prediction type
        return pipe

    monkeypatch.setattr("agentsd.dreambooth.training._source", load)
    with pytest.raises(ValueError, match="predicts 'flow_prediction', which is not trained here"):
        Run(dreambooth.DreamBoothConfig(**settings)).train()
    assert not list(settings["output_dir"].glob("*"))
    assert not settings["class_data_dir"].exists()


def test_only_the_forward_runs_in_autocast(settings, monkeypatch):
    """Else half-precision copies of the weights live until the optimizer's step."""
    seen = []
    backward = Accelerator.backward
    monkeypatch.setattr(
        Accelerator,
        "backward",
        lambda self, loss: seen.append(("backward", _casts())) or backward(self, loss),
    )
    step = torch.optim.AdamW.step
    monkeypatch.setattr(
        torch.optim.AdamW,
        "step",
        lambda self, *args, **more: seen.append(("step", _casts())) or step(self, *args, **more),
    )
    monkeypatch.setattr(
        "agentsd.dreambooth.training.diffusion_loss",
        lambda *args: seen.append(("forward", _casts())) or diffusion_loss(*args),
    )
    more = {"max_train_steps": 1, "mixed_precision": "bf16", "with_prior_preservation": False}
    more |= {"num_validation_images": 1, "use_8bit_adam": False, "report_to": "none"}
    Run(dreambooth.DreamBoothConfig(**settings | more)).train()
    assert seen == [("forward", True), ("backward", False), ("step", False)]


def _casts():
    return torch.is_autocast_enabled("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there half precision trains")
def test_half_precision_is_refused_where_nothing_scales_it(settings):
    config = dreambooth.DreamBoothConfig(**settings, mixed_precision="fp16")
    with pytest.raises(ValueError, match="needs a CUDA device: pass 'bf16' or 'no'"):
        Run(config)
    assert not settings["output_dir"].exists()


def test_an_export_replaces_no_other_folder(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "holiday.jpg").touch()
    with pytest.raises(ValueError, match="photos is no exported pipeline and stays as it is"):
        check_export(tmp_path / "photos")
    check_export(tmp_path / "none")


def test_nothing_is_reported_where_none_is_said(settings):
    config = dreambooth.DreamBoothConfig(**settings, report_to="none")
    assert not Run(config).accelerator.log_with


@pytest.mark.parametrize("operator", [AgentModule(), FocusedLinear(), AttnZero()])
def test_an_untrained_module_is_told(operator):
    unet = make_unet()
    with warned(f"{operator.name} is untrained"):
        apply_agentsd(unet, recipe=Recipe(operator))
    with silent():
        apply_agentsd(make_unet().train(), recipe=Recipe(operator))  # it is to be trained


def test_modules_start_as_torchs_do(monkeypatch):
    """From the same numbers as a convolution of torch's own would draw."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        expected = FocusedLinearAttention(2, 4).state_dict()
    module = FocusedLinearAttention(2, 4)
    module.reset(torch.Generator().manual_seed(3))
    state = module.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in state)


@pytest.mark.parametrize(("old", "new"), [(9, 25), (25, 9), (12, 20)])
def test_agent_biases_are_resized_to_other_agents(old, new):
    """The oracle is torch's interpolation of one plane at a time."""
    grid = (8, 8)
    small, large = (AgentAttention(2, 4, grid=grid, agents=n, from_scratch=True) for n in (old, new))
    for part in (small.gather_bias.row, small.gather_bias.column, small.gather_bias.block):
        made = resize_agents(part, grid, (large.rows, large.cols))
        assert made.shape == (2, large.rows * large.cols, *part.shape[2:])
        for head, y, x in ((0, 0, 0), (1, part.shape[2] - 1, part.shape[3] - 1)):
            plane = part[head, :, y, x].view(1, 1, small.rows, small.cols)
            expected = interpolate(plane, size=(large.rows, large.cols), mode="bilinear").flatten()
            torch.testing.assert_close(made[head, :, y, x], expected)


@pytest.mark.parametrize("size", [(3, 3), (5, 9), (8, 8), (12, 7)])
def test_the_number_of_agents_tells_their_grid(size):
    for count in range(1, 50):
        module = AgentAttention(1, 2, grid=size, agents=count, bias=False, convolution=False)
        assert agent_grid(module.rows * module.cols, *size) == (module.rows, module.cols)


def test_weights_are_loaded_for_another_number_of_agents(tmp_path):
    """By the recipe beside them, in which the count is changed."""
    handle = apply_agentsd(make_unet().train(), recipe=Recipe(AgentModule(count=9)))
    for name, parameter in handle._layers.modules[0].named_parameters():
        if "_bias" in name:
            torch.nn.init.constant_(parameter, 0.25)
    handle.save(tmp_path)
    Recipe(AgentModule(count=25)).save(tmp_path)
    with logged() as messages:
        other = apply_agentsd(make_unet(), recipe=tmp_path)
    assert not messages
    row = other._layers.modules[0].gather_bias.row
    assert row.shape[1] == 25
    assert torch.equal(row, torch.full_like(row, 0.25))


def test_the_mediators_formula_is_the_papers():
    """Eq. 7 to 9 of the mediators' paper have no residual, and the usual scale."""
    assert (PooledAgents().k, PooledAgents().scale) == (0.0, -0.5)
