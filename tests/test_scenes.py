"""Scenes: pure functions of a seed that hold what their captions say."""

import colorsys

import numpy as np
import pytest
from agentsd_demo import load_pipeline
from agentsd_demo.data import load_references
from agentsd_demo.reading import ConceptReader, count_things, read_scene
from agentsd_demo.scenes import COLOURS, SIZES, Triple, compose, random_scene, scene_caption, triples
from agentsd_demo.training.accuracy import efficientnet_lite0
from agentsd_demo.training.reading import PARTS, shares, spread
from PIL import Image

FOX = Triple("fox face", "3d", "blue")


def test_a_scene_is_a_pure_function_of_its_seed():
    first, again, other = (np.asarray(compose(FOX, seed).image) for seed in (7, 7, 8))
    assert (first == again).all()
    assert (first != other).any()
    # Recorded once: training and references of other machines are the same scenes.
    scene = random_scene("recorded", among=triples(concepts=("fox face", "panda face", "star")))
    assert (scene.triple, scene.box) == (Triple("star", "3d", "purple"), (24, 5, 97))


@pytest.mark.parametrize("size", SIZES)
def test_the_sprite_is_in_its_box_and_the_rest_is_background(size):
    sprite = next(r.sprite for r in load_references() if (r.concept, r.style) == ("fox face", "3d"))
    for seed in range(3):
        scene = compose(FOX, seed, size)
        left, top, side = scene.box
        assert min(left, top) >= 0
        assert max(left, top) + side <= size
        assert 88 / 128 <= side / size <= 120 / 128
        pixels = np.asarray(scene.image, float)
        outside = np.ones((size, size), bool)
        outside[top : top + side, left : left + side] = False
        # A background of two shades is a plane in each channel.
        y, x = np.mgrid[:size, :size]
        plane = np.stack([x, y, np.ones_like(x)], -1).astype(float)
        fit = np.linalg.lstsq(plane[outside], pixels[outside], rcond=None)[0]
        assert np.abs(plane[outside] @ fit - pixels[outside]).max() < 1
        # In the box it is the sprite over that plane.
        rgba = np.asarray(sprite.resize((side, side), 1), float)
        alpha = rgba[..., 3:] / 255
        box = slice(top, top + side), slice(left, left + side)
        expected = alpha * rgba[..., :3] + (1 - alpha) * (plane[box] @ fit)
        assert np.abs(pixels[box] - expected).max() < 3


@pytest.mark.parametrize("colour", COLOURS)
def test_a_background_is_of_the_colour_that_the_caption_names(colour):
    """The oracle names the colour by the nearest middle of the ranges, in RGB."""
    middles = {
        name: colorsys.hsv_to_rgb(hue, sum(saturation) / 2, sum(value) / 2)
        for name, (hue, saturation, value) in COLOURS.items()
    }
    for seed in range(5):
        scene = compose(Triple("fox face", "3d", colour), seed)
        pixels = np.asarray(scene.image, float) / 255
        corners = np.stack([pixels[y, x] for y in (0, -1) for x in (0, -1)])
        found = min(middles, key=lambda name: np.abs(corners.mean(0) - middles[name]).sum())
        assert found == colour


def test_held_out_triples_are_a_quarter_and_pairs_are_those_of_the_references():
    every = triples()
    assert len(every) == 17 * 2 * len(COLOURS)
    pairs = {(r.concept, r.style) for r in load_references() if r.split == "heldout"}
    assert {(t.concept, t.style) for t in triples("heldout pair")} == pairs
    heldout, seen = triples("heldout triple"), triples("seen")
    assert len(heldout) >= 70
    assert 0.2 < len(heldout) / (len(heldout) + len(seen)) < 0.3
    assert len(seen) + len(heldout) + len(triples("heldout pair")) == len(every)
    # What is held out is a combination: its parts were all seen elsewhere.
    assert {t.colour for t in seen} == set(COLOURS)
    assert {(t.concept, t.style) for t in heldout} <= {(t.concept, t.style) for t in seen}


def test_every_caption_fits_the_tokenizer_and_none_reads_like_another():
    tokenizer = load_pipeline().tokenizer
    captions = [triple.caption for triple in triples(concepts="all")]
    ids = tokenizer(captions).input_ids
    trained = tokenizer([triple.caption for triple in triples()]).input_ids
    assert max(map(len, trained)) <= tokenizer.model_max_length
    assert len({tuple(row) for row in ids}) == len(set(captions)) == len(captions)
    assert FOX.caption == "a 3d emoji of a fox face on blue"
    assert scene_caption("owl", None, "red") == "an emoji of an owl on red"
    assert scene_caption("owl", "noto", None) == "a noto emoji of an owl"


@pytest.fixture(scope="module")
def reader():
    return ConceptReader(("fox face", "star", "red apple"), efficientnet_lite0(), views=2)


def test_a_composed_scene_is_read_as_what_it_shows(reader):
    asked = [t for t in triples(concepts=("fox face", "star", "red apple")) if t.colour != "white"][::10]
    scenes = [compose(triple, f"test/{i}", SIZES[i % 3]) for i, triple in enumerate(asked)]
    for scene in scenes:
        found = read_scene(scene.image)
        left, top, side = scene.box
        alpha = next(
            r.sprite.resize((side, side), 1).getchannel("A").point(lambda a: 255 * (a > 100)).getbbox()
            for r in load_references()
            if (r.concept, r.style) == (scene.triple.concept, scene.triple.style)
        )
        truth = np.asarray(alpha) + np.asarray((left, top, left, top))
        assert found.colour == scene.triple.colour
        assert np.abs(truth - found.box).max() <= 6 / 64 * scene.image.width
    every = shares(asked, [scene.image for scene in scenes], reader)
    assert all(row[part] == 1 for row in every.values() for part in PARTS)
    # Asked for something else, the same images are wrong.
    others = shares(asked[1:] + asked[:1], [scene.image for scene in scenes], reader)
    assert sum(row["colour"] * row["images"] for row in others.values()) < len(asked) / 2


@pytest.mark.parametrize("size", SIZES)
def test_things_are_counted(size):
    """The oracle pastes them: none, one, and two."""
    sprite = next(r.sprite for r in load_references() if r.concept == "fox face")
    sprite = sprite.resize((size // 2, size // 2))
    canvas = Image.new("RGB", (size, size), "blue")
    assert count_things(canvas) == 0
    for count, place in ((1, 0), (2, size // 2)):
        canvas.paste(sprite, (place, place), sprite)
        assert count_things(canvas) == count


def test_an_empty_background_has_no_sprite_and_the_spread_is_that_of_the_centres():
    plain = compose(FOX, 1).image.resize((1, 1)).resize((128, 128))
    assert read_scene(plain).box is None
    assert spread([plain]) == 0
    scenes = [compose(FOX, seed) for seed in range(40)]
    centres = np.asarray([(left + side / 2, top + side / 2) for left, top, side in (s.box for s in scenes)])
    assert spread([scene.image for scene in scenes]) == pytest.approx(centres.std(0).mean(), rel=0.05)
