"""The emoji that the toy model learns: their captions, and which are held out."""

import pytest
from agentsd_demo import load_pipeline, load_references
from agentsd_demo.data import STYLES, caption_of, split_of, trained_concepts


def test_every_caption_fits_the_tokenizer():
    tokenizer = load_pipeline().tokenizer
    captions = [reference.caption for reference in load_references(trained_only=False)]
    ids = tokenizer(captions).input_ids
    assert max(map(len, ids)) <= tokenizer.model_max_length
    words = {tuple(row) for row in ids}
    assert len(words) == len(set(captions)), "two captions look the same to the model"


def test_the_references_are_labelled():
    references = load_references(trained_only=False)
    assert len(references) == 1706
    assert len({(r.concept, r.style) for r in references}) == len(references)
    assert all(r.image.size == (64, 64) and r.image.mode == "RGB" for r in references)
    assert all(r.caption == caption_of(r.concept, r.style) for r in references)


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


def test_references_can_be_chosen():
    trained = load_references()
    assert {r.concept for r in trained} == set(trained_concepts())
    name = trained[0].concept
    assert {r.concept for r in load_references(concepts=[name])} == {name}
    with pytest.raises(ValueError, match=r"no reference images of .'a word of nonsense'."):
        load_references(concepts=["a word of nonsense"])


@pytest.mark.parametrize(
    ("concept", "caption"),
    [("kite", "a 3d emoji of a kite"), ("axe", "a 3d emoji of an axe"), ("peas", "a 3d emoji of peas")],
)
def test_captions_read_well(concept, caption):
    assert caption_of(concept, "3d") == caption
