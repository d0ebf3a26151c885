"""The bundled toy model, its images, and the emoji that it learns: their captions, and which are held out."""

import json

import numpy as np
import pytest
import torch
from agentsd_demo import load_pipeline, load_references
from agentsd_demo.data import REFERENCES, STYLES, caption_of, split_of, trained_concepts
from agentsd_demo.training.accuracy import accuracy, autoencoded, generate, nearest
from PIL import Image


@pytest.fixture(scope="module")
def pipe():
    return load_pipeline()


def test_the_pipeline_is_an_ordinary_small_stable_diffusion(pipe):
    assert type(pipe).__name__ == "StableDiffusionPipeline"
    assert pipe.unet.config.sample_size**2 >= 1024
    assert pipe.safety_checker is None
    scheduler = pipe.scheduler.config
    assert (scheduler.beta_start, scheduler.beta_end) == (0.00085, 0.012)
    assert scheduler.beta_schedule == "scaled_linear"
    assert scheduler.skip_prk_steps
    assert not scheduler.set_alpha_to_one
    assert {p.dtype for p in pipe.unet.parameters()} == {torch.float32}


def test_a_dtype_can_be_asked_for_and_a_folder_without_a_pipeline_is_named(tmp_path):
    assert load_pipeline(dtype=torch.bfloat16).unet.dtype == torch.bfloat16
    with pytest.raises(FileNotFoundError, match=f"no exported pipeline in {tmp_path}"):
        load_pipeline(folder=tmp_path)


def test_one_seed_makes_one_image(pipe):
    prompt = load_references()[0].caption
    first, again = (np.asarray(generate(pipe, [prompt], steps=2)[0]) for _ in range(2))
    other = np.asarray(generate(pipe, [prompt], steps=2, seed=1)[0])
    assert first.shape == (128, 128, 3)
    assert (first == again).all()
    assert (first != other).any()


def test_the_autoencoder_keeps_an_image(pipe):
    references = load_references()[:4]
    images = autoencoded(pipe, [reference.image for reference in references])
    for reference, image in zip(references, images, strict=True):
        error = np.asarray(image, float) - np.asarray(reference.image, float)
        assert -10 * np.log10((error**2).mean() / 255**2) > 28


def test_accuracy_counts_either_style_of_the_asked_concept():
    first = load_references()[0]
    references = [r for r in load_references() if r.split == first.split][:6]

    def features(images):
        """Recognise an image by its exact pixels."""
        keys = [reference.image.tobytes() for reference in references]
        return torch.eye(len(keys))[[keys.index(image.tobytes()) for image in images]]

    exact = [(r, r.image) for r in references]
    assert accuracy(exact, references, features) == {first.split: 1.0}
    wrong = next(r for r in references if r.concept != references[0].concept)
    half = [(references[0], references[0].image), (references[0], wrong.image)]
    assert accuracy(half, references, features) == {first.split: 0.5}
    assert nearest(torch.eye(3), torch.eye(3)[[2, 0, 1]]) == [1, 2, 0]


def test_the_references_are_labelled():
    references = load_references(trained_only=False)
    assert len(references) == 1706
    assert len({(r.concept, r.style) for r in references}) == len(references)
    assert all(r.image.size == (128, 128) and r.image.mode == "RGB" for r in references)
    sides = {(r.style, r.concept in trained_concepts()): r.sprite.size for r in references}
    assert sides == {
        ("3d", True): (256, 256),
        ("noto", True): (128, 128),
        ("3d", False): (64, 64),
        ("noto", False): (64, 64),
    }
    assert all(r.caption == caption_of(r.concept, r.style) for r in references)
    for concept, words in {"kite": "a kite", "axe": "an axe", "peas": "peas"}.items():
        assert caption_of(concept, "3d") == f"a 3d emoji of {words}"
    assert {r.concept for r in load_references()} == set(trained_concepts())
    with pytest.raises(ValueError, match=r"no reference images of .'a word of nonsense'."):
        load_references(concepts=["a word of nonsense"])


def test_a_large_sprite_is_the_one_of_its_name():
    """The oracle is the small grid, made from other files for one of the styles."""
    rows = [
        json.loads(line) for line in (REFERENCES / "index.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    small = {style: Image.open(REFERENCES / f"{style}.webp").convert("RGBA") for style in STYLES}
    cells = {(row["concept"], row["style"]): row["cell"] for row in rows}
    for reference in load_references():
        cell = cells[reference.concept, reference.style]
        left, top = 64 * (cell % 32), 64 * (cell // 32)
        whole = reference.sprite.resize((64, 64), Image.Resampling.LANCZOS)
        images = [small[reference.style].crop((left, top, left + 64, top + 64)), whole]
        shown = [Image.alpha_composite(Image.new("RGBA", (64, 64), "white"), image) for image in images]
        difference = np.abs(np.subtract(*(np.asarray(image, float) for image in shown)))
        assert difference.mean() < 4


def test_a_tenth_of_the_pairs_is_held_out_and_never_a_whole_concept():
    references = load_references(trained_only=False)
    both = {r.concept for r in references if r.style == "3d"} & {
        r.concept for r in references if r.style == "noto"
    }
    for reference in references:
        expected = split_of(reference.concept, reference.style) if reference.concept in both else "seen"
        assert reference.split == expected
    heldout = [r for r in references if r.split == "heldout"]
    assert len({r.concept for r in heldout}) == len(heldout)
    assert 0.08 < len(heldout) / len(references) < 0.12
    assert {r.style for r in heldout} == set(STYLES)
