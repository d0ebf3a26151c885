"""What a run's images are asked by: prompts, classes, the toy model's captions, or prompts that ship."""

import pytest
from agentsd_demo.scenes import Triple
from agentsd_eval.errors import EvalError
from agentsd_eval.images.prompts import (
    SHIPPED,
    from_classes,
    from_triples,
    specs_of,
    specs_to_show,
    unknown_words,
)
from agentsd_eval.settings import CheckSettings, CompareSettings, RunSettings


def test_the_papers_prompt_asks_for_each_class_twice():
    twice = from_classes(["a", "b"], 5)
    assert [(p.prompt[-2:], p.seed) for p in twice] == [("a.", 5), ("a.", 6), ("b.", 7), ("b.", 8)]


def test_an_empty_list_and_two_lists_are_refused(tmp_path):
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    with pytest.raises(EvalError, match=r"empty.txt is empty"):
        RunSettings(prompts=empty)
    empty.write_text("a cat\n")
    with pytest.raises(ValueError, match="--prompts and --classes exclude each other: give one"):
        RunSettings(prompts=empty, classes=empty)


def test_a_model_is_asked_for_the_prompts_that_are_given_or_those_that_ship(tmp_path):
    (tmp_path / "own.txt").write_text("a cat\n")
    assert {spec.prompt for spec in specs_of(CheckSettings(prompts=tmp_path / "own.txt"))} == {"a cat"}
    shipped = SHIPPED.read_text().splitlines()
    assert [spec.prompt for spec in specs_of(CheckSettings(model="x/y"))] == shipped
    assert [spec.prompt for spec in specs_to_show(CompareSettings(model="x/y"))] == shipped[:6]
    assert len(set(shipped)) == CheckSettings().images


def test_words_that_the_model_was_never_taught_are_found():
    class Words:
        def get_vocab(self):
            return {"photo</w>": 1, "xylo": 2, "a</w>": 3}

    prompts = ["a photo of a Xylophone, blue", "a zyzzyva or a xylophone"]
    found = unknown_words(Words(), prompts)
    assert [word for word in found if word not in ("blue", "or")] == ["xylophone", "zyzzyva"]


def test_captions_are_spread_over_what_scenes_can_show():
    every = [Triple("kite", "3d", str(number)) for number in range(10)]
    twelve = from_triples(every, 12, 100)
    assert sorted(p.prompt[-1] for p in twelve[:10]) == list("0123456789")
    assert [p.prompt for p in twelve[10:]] == [p.prompt for p in twelve[:2]]
    assert [p.seed for p in twelve] == list(range(100, 112))
    hundred = [Triple("kite", "3d", str(number)) for number in range(100)]
    for images in (5, 20, 50):  # of 100 in a ring the next one is near: at most three even distances on
        fewer = from_triples(hundred, images, 100)
        assert fewer == from_triples(hundred, 60, 100)[:images]
        places = sorted(int(p.prompt.split()[-1]) for p in fewer)
        gaps = [(b - a) % 100 for a, b in zip(places, places[1:] + places[:1], strict=True)]
        assert max(gaps) <= 3 * 100 / images
