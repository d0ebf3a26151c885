"""DreamBooth's images: read, drawn by number, and the users' files that it leaves as they are."""

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import diffusers
import numpy as np
import pytest
import torch
from dreamboothing import train
from PIL import Image
from tiny import BETAS, make_unet

from agentsd.dreambooth.data import SubjectImages, find_images, image_paths, load_image
from agentsd.dreambooth.images import draw_class_images, missing_class_images


class Painter:
    """In place of a pipeline: an image whose grey level is the seed."""

    def __init__(self):
        self.unet, self.scheduler = make_unet(), diffusers.DDIMScheduler(**BETAS)
        self.text_encoder = torch.nn.Identity()

    def __call__(self, prompt, generator, **settings):
        assert len(prompt) == len(generator) <= 2
        return SimpleNamespace(images=[grey(rng.initial_seed()) for rng in generator])


def grey(level):
    return Image.new("RGB", (8, 8), (level,) * 3)


def levels(folder):
    return {path.name: Image.open(path).convert("L").getpixel((0, 0)) for path in image_paths(folder)}


@pytest.fixture
def fill(run_config):
    """Fill the class folder up to so many images; returns it."""

    def fill(count):
        config = run_config(num_class_images=count, sample_batch_size=2)
        draw_class_images(Painter(), config, missing_class_images(config), lambda: None)
        return config.class_data_dir

    return fill


def test_a_class_folder_is_filled_and_nothing_is_written_over(fill):
    folder = fill(4)
    assert levels(folder) == {f"class-{n:05d}.png": n for n in range(4)}
    (folder / "class-00001.png").unlink()
    grey(77).save(folder / "class-00003.png")  # the user's own by now
    grey(88).save(folder / "mine.JPG", format="JPEG")
    fill(5)
    made = levels(folder)
    assert len(made) == 5
    assert made["class-00001.png"] == 1  # the one that lacked, from its own seed
    assert made["class-00003.png"] == 77
    assert levels(fill(5)) == made


def test_two_processes_fill_one_folder(fill):
    with ThreadPoolExecutor(2) as pool:
        [folder, _] = pool.map(fill, (6, 6))
    assert 6 <= len(levels(folder)) <= 7
    assert all(level == int(name[6:11]) for name, level in levels(folder).items())


def images_of(instance, classes=(), batch_size=1, **more):
    """With tokens 0 and 1 for the prompts."""
    load, ids = partial(load_image, resolution=16), torch.zeros(1, 4, dtype=torch.int64)
    return SubjectImages(instance, list(classes), ids, ids + 1, load, batch_size, seed=0, **more)


def test_images_are_drawn_by_number(photographs):
    found = find_images(photographs)
    images = images_of(found, found, batch_size=2)
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
    found = find_images(tmp_path)
    images = [images_of(found, found[:4], 3, process=process, processes=2) for process in (0, 1)]
    batches = [images[p][n].images[:, 0, 0, 0] for n in range(10) for p in (0, 1)]
    for half, size in ((slice(3), 5), (slice(3, 6), 4)):
        seen = torch.cat([(batch[half] + 1) * 127.5 for batch in batches]).round().int().tolist()
        passes = [seen[i : i + size] for i in range(0, 60, size)]
        assert all(sorted(one) == grey_levels[:size] for one in passes)
        assert len({tuple(one) for one in passes}) > 5


def test_what_is_not_read_is_named(tmp_path, caplog):
    for name in ("one.png", "two.JPG"):
        grey(9).save(tmp_path / name)
    for name in ("._one.png", "a.heic", "b.TIFF", "notes.txt"):
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


def test_squares_are_cut_at_the_centre_or_anywhere(tmp_path):
    """Of a strip whose grey level is its column: the left edge of the square says where it was cut."""
    strip = Image.fromarray(np.tile(np.arange(256, dtype=np.uint8), (16, 1))).convert("RGB")
    strip.save(tmp_path / "strip.png")
    images = images_of([tmp_path / "strip.png"])

    def left(images):
        return [round(float((images[n].images[0, 0, 0, 0] + 1) * 127.5)) for n in range(40)]

    assert set(left(images)) == {120}
    anywhere = left(replace(images, random_crop=True))
    assert len(set(anywhere)) > 30
    assert min(anywhere) < 20
    assert 220 < max(anywhere) <= 240


def test_a_model_that_predicts_something_else_is_refused(run_config, make_pipeline, monkeypatch, tmp_path):
    pipe = make_pipeline()
    pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler()  # whose config has no prediction type
    monkeypatch.setattr("agentsd.dreambooth.models.load_pretrained", lambda *args, **settings: pipe)
    with pytest.raises(ValueError, match="predicts 'flow_prediction', which is not trained here"):
        train(run_config(with_prior_preservation=True))
    assert not list((tmp_path / "out").iterdir())
    assert not (tmp_path / "class").exists()
