"""DreamBooth's images, its loss, and the users' files that it leaves as they are."""

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import diffusers
import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from PIL import Image
from tiny import BETAS, make_unet

from agentsd.dreambooth.config import DreamBoothConfig
from agentsd.dreambooth.data import SubjectImages, find_images, image_paths, load_image
from agentsd.dreambooth.images import draw_class_images, missing_class_images
from agentsd.dreambooth.training import Run


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
        "sample_batch_size": 2,
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
        self.text_encoder = torch.nn.Identity()

    def __call__(self, prompt, generator, **settings):
        assert len(prompt) == len(generator) <= 2
        return type("Output", (), {"images": [grey(rng.initial_seed()) for rng in generator]})()


def grey(level):
    return Image.new("RGB", (8, 8), (level,) * 3)


def levels(folder):
    return {path.name: Image.open(path).convert("L").getpixel((0, 0)) for path in image_paths(folder)}


def fill(settings, count):
    config = DreamBoothConfig(**settings, num_class_images=count)
    draw_class_images(Painter(), config, missing_class_images(config), lambda: None)


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


def test_images_are_drawn_by_number(settings):
    ids = torch.zeros(1, 4, dtype=torch.int64)
    found = find_images(settings["instance_data_dir"])
    images = SubjectImages(found, found, ids, ids + 1, partial(load_image, resolution=16), 2, seed=0)
    a, b, *others = (images[number] for number in (5, 5, *range(6, 16)))
    assert torch.equal(a.images, b.images)
    assert a.seed == b.seed
    assert a.images.shape == (4, 3, 16, 16)
    assert a.text[:, 0].tolist() == [0, 0, 1, 1]
    of_another = replace(images, process=1)[5]
    assert len({one.seed for one in (a, *others, of_another)}) == 12


def test_passes_are_passes(tmp_path):
    """Batches of two processes in turn: each image once in every pass, in another order."""
    grey_levels = [20, 40, 60, 80, 100]
    for level in grey_levels:
        grey(level).save(tmp_path / f"{level:03}.png")
    found, ids = find_images(tmp_path), torch.zeros(1, 1)
    load = partial(load_image, resolution=8)
    images = [SubjectImages(found, found[:4], ids, ids, load, 3, 0, p, 2) for p in (0, 1)]
    batches = [images[p][n].images[:, 0, 0, 0] for n in range(10) for p in (0, 1)]
    for half, size in ((slice(3), 5), (slice(3, 6), 4)):
        seen = torch.cat([(batch[half] + 1) * 127.5 for batch in batches]).round().int().tolist()
        passes = [seen[i : i + size] for i in range(0, 60, size)]
        assert all(sorted(one) == grey_levels[:size] for one in passes)
        assert len({tuple(one) for one in passes}) > 5


def test_what_is_not_read_is_named(tmp_path, caplog):
    for name in ("one.png", "two.JPG", "._one.png"):
        (tmp_path / name).write_bytes(b"")
        if name[0] != ".":
            grey(9).save(tmp_path / name)
    for name in ("a.heic", "b.TIFF", "notes.txt"):
        (tmp_path / name).touch()
    with caplog.at_level(logging.WARNING, logger="agentsd"):
        assert [path.name for path in find_images(tmp_path)] == ["one.png", "two.JPG"]
    [told] = caplog.messages
    assert told.endswith("save as PNG or JPEG: a.heic, b.TIFF")


def test_grey_of_16_bits_is_scaled(tmp_path):
    levels = np.linspace(0, 65535, 64).round().astype(np.uint16).reshape(8, 8)
    Image.fromarray(levels).save(tmp_path / "deep.png")
    made = load_image(tmp_path / "deep.png", resolution=8)
    assert np.abs((made.numpy() + 1) / 2 - levels / 65535).max() < 0.6 / 255


def test_the_subjects_folder_by_another_name_is_refused(settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="class_data_dir='subject' is the subject's: choose another"):
        DreamBoothConfig(**settings | {"class_data_dir": "subject"})


def test_squares_are_cut_at_the_centre_or_anywhere(tmp_path):
    """Of a strip whose grey level is its column: the left edge of the square says where it was cut."""
    strip = Image.fromarray(np.tile(np.arange(256, dtype=np.uint8), (16, 1))).convert("RGB")
    strip.save(tmp_path / "strip.png")
    load = partial(load_image, resolution=16)
    images = SubjectImages([tmp_path / "strip.png"], [], torch.zeros(1, 1), torch.zeros(1, 1), load, 1, 0)

    def left(images):
        return [round(float((images[n].images[0, 0, 0, 0] + 1) * 127.5)) for n in range(40)]

    assert set(left(images)) == {120}
    anywhere = left(replace(images, random_crop=True))
    assert len(set(anywhere)) > 30
    assert min(anywhere) < 20
    assert 220 < max(anywhere) <= 240


def test_a_model_that_predicts_something_else_is_refused(settings, make_pipeline, monkeypatch):
    def load(kind, source, **settings):
        pipe = make_pipeline()
        pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler()  # whose config has no prediction type
        return pipe

    monkeypatch.setattr("agentsd.dreambooth.models.load_pretrained", load)
    with pytest.raises(ValueError, match="predicts 'flow_prediction', which is not trained here"):
        Run(DreamBoothConfig(**settings | {"pretrained_model_name_or_path": "some/model"})).train()
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
