"""The study of a finetuned subject: its figures, its command, and the views that ship."""

import csv
from functools import partial

import agentsd_demo
import agentsd_demo.data
import agentsd_demo.scenes
import commands
import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from agentsd_demo import SUBJECT, load_references
from agentsd_demo.scenes import compose, triples
from agentsd_demo.training.accuracy import efficientnet_lite0
from agentsd_demo.training.subject import View
from agentsd_eval.images import generate
from agentsd_eval.images.prompts import ImageSpec
from agentsd_eval.images.sampling import Seconds
from agentsd_eval.images.store import Store
from agentsd_eval.research import subject, subject_plan, subject_scores
from agentsd_eval.research.__main__ import main
from agentsd_eval.research.settings import SubjectSettings
from PIL import Image
from rich.console import Console

from agentsd import Agents, Merge, Phases, Recipe
from agentsd.dreambooth import training
from agentsd.dreambooth.data import find_images
from agentsd.progress import progress

CONCEPTS = ["strawberry", "panda face", "carrot"]
invoke = partial(commands.invoke, "subject", program=main)


@pytest.fixture(autouse=True)
def few_references(monkeypatch):
    """Three concepts to be nearest to, so that features take no time; no precision of another test."""
    AcceleratorState._reset_state(reset_partial_state=True)
    for module in (agentsd_demo.data, agentsd_demo.scenes):
        monkeypatch.setattr(module, "trained_concepts", lambda: CONCEPTS)


@pytest.fixture
def tiny_demo(make_pipeline, monkeypatch):
    """A tiny pipeline in the place of the toy model."""

    def load(dtype=torch.float32, device="cpu"):
        return make_pipeline().to(device, dtype)

    monkeypatch.setattr(agentsd_demo, "load_pipeline", load)
    monkeypatch.setattr("agentsd.demo.load_pipeline", load)


def test_similarity_is_the_mean_cosine():
    features, views = np.array([[3.0, 0.0], [1.0, 1.0]]), np.array([[1.0, 0.0], [0.0, 2.0]])
    assert subject_scores.similarity(features, views) == pytest.approx([0.5, 0.5**0.5])
    # pairs of the three: 0, 1/sqrt(2), 1/sqrt(2)
    assert subject_scores.similarity_among(np.array([[1.0, 0], [0, 2], [1, 1]])) == pytest.approx(
        2 / 3 * 0.5**0.5
    )


def test_agents_generate_as_they_were_trained():
    settings = SubjectSettings(ratio=0.3)
    variants = subject_plan.variants_of(settings)
    assert [v.weights for v in variants] == [
        "before", *["baseline"] * 3, "agents", *["baseline-prior"] * 3, "agents-prior",
    ]  # fmt: skip
    applied = [v.recipe for v in variants if v.parts]
    trained = subject_plan.training_config("agents", settings)
    agents = Agents(0.3, at_most=None, agent_ratio=0.95, ranking="layer", destinations="random")
    assert trained.recipe == Recipe(agents, levels=1)
    early = Recipe(Phases(agents, Merge(0.3, ranking="layer", destinations="random")), levels=1)
    assert applied == [early, trained.recipe, trained.recipe] * 2
    assert [subject_plan.training_config(name, settings).apply for name in subject_plan.TRAININGS] == [
        "none", "train+generate",
    ] * 2  # fmt: skip
    assert {subject_plan.baseline_of(v, variants) for v in variants[5:]} == {variants[5]}
    assert {subject_plan.baseline_of(v, variants) for v in variants[:5]} == {variants[1]}


def test_changes_are_against_the_baseline_of_the_same_prior(tmp_path):
    """By hand: row i has right i**2 and i**2 + i, and took 1 + i seconds."""
    settings = SubjectSettings(images=2, other_prompts=2, out=tmp_path)
    variants, store = subject_plan.variants_of(settings), Store(tmp_path)
    image, spec = Image.new("RGB", (8, 8)), ImageSpec(0, "a face", 0)
    for i, variant in enumerate(variants):
        store.save(variant, 0, [spec], [image], Seconds(9.0, 1.0 + i), "session")
    figures = {variant: {"right": np.array([i**2, i**2 + i])} for i, variant in enumerate(variants)}
    rows = subject_scores.rows_of(figures, store, settings, torch.device("cpu"))
    assert [row["right"] for row in rows] == [i**2 + i / 2 for i in range(9)]
    assert [row["right_error"] for row in rows] == pytest.approx([i / 2 for i in range(9)])
    mean, paired = rows[8]["right_change"], rows[8]["right_change_error"]  # against row 5
    assert (mean, paired) == pytest.approx((64 + 4 - 25 - 2.5, (8 - 5) / 2))
    assert [row["speedup"] for row in rows] == pytest.approx([1 / (1 + i) for i in range(9)])
    assert {row["seconds"] for row in rows} == {9.0}


def test_the_command_trains_once_and_goes_on(tiny_demo, tmp_path, monkeypatch):
    out = tmp_path / "run"
    tiny = (
        "--train-steps", 1, "--learning-rate", 1e-3, "--class-images", 1,
        "--images", 2, "--other-prompts", 2, "--steps", 2, "--out", out,
    )  # fmt: skip
    assert "the subject" in invoke(*tiny)
    rows = commands.rows_of(out / "subject.jsonl")
    assert [row.get("prior") for row in rows] == [False] * 5 + [True] * 4 + [None]
    similarities = [row["similarity"] for row in rows]
    assert [i for i, row in enumerate(rows) if row.get("similarity_change") is None] == [1, 5, 9]
    with (out / "subject.csv").open(newline="") as file:
        assert [float(row["similarity"]) for row in csv.DictReader(file)] == similarities
    assert (out / "subject.md").read_text().count("| train+generate, prior |") == 3
    with Image.open(out / "subject.png") as image:
        assert image.format == "PNG"
    assert isinstance(Recipe.load(out / "agents-prior" / "model").attention, Agents)
    assert not (out / "baseline" / "model" / "agentsd.json").exists()
    assert not list(out.glob("*/model/checkpoint-*"))

    made = []
    sample = generate.sample
    monkeypatch.setattr("agentsd.dreambooth.training.Run", None)  # another training would fail
    monkeypatch.setattr(generate, "sample", lambda *a, **k: made.append(a[1].weights) or sample(*a, **k))
    lost = next(out.glob("images/baseline-prior-baseline-*/00003.png"))
    before = lost.read_bytes()
    lost.unlink()
    invoke(*tiny)
    assert made == ["before", "baseline-prior"]  # the first row is timed beside it
    assert lost.read_bytes() == before
    assert [row["similarity"] for row in commands.rows_of(out / "subject.jsonl")] == similarities
    (out / "baseline" / "trained.json").unlink()
    printed = invoke(*tiny, "--learning-rate", 2e-3, code=2)
    assert "(learning_rate: 0.001 there, 0.002 now); choose another --out" in printed


def test_a_killed_training_goes_on(tiny_demo, tmp_path, monkeypatch):
    settings = SubjectSettings(train_steps=3, steps=2, out=tmp_path, subject=SUBJECT)
    config = subject_plan.training_config("agents", settings).model_copy(update={"checkpointing_steps": 2})
    monkeypatch.setattr(subject, "training_config", lambda *_: config)
    step, steps = training.Run._optimise, []

    def until_killed(run, *args):
        steps.append(run.step)
        if steps == [0, 1, 2]:
            raise KeyboardInterrupt
        return step(run, *args)

    monkeypatch.setattr(training.Run, "_optimise", until_killed)
    for _ in range(2):
        with progress(Console(quiet=True)) as bars:
            try:
                subject.train("agents", settings, bars)
            except KeyboardInterrupt:
                assert not (tmp_path / "agents" / "trained.json").exists()
    assert steps == [0, 1, 2, 2]
    assert (tmp_path / "agents" / "trained.json").exists()


def test_images_are_judged_by_views_and_references(tmp_path):
    settings = SubjectSettings(images=2, other_prompts=4, out=tmp_path)
    own, others = subject_plan.specs_of(settings)
    assert [spec.index for spec in (*own, *others)] == list(range(6))
    assert len({spec.seed for spec in (*own, *others)}) == 6
    views = [subject_plan.as_trained(path, 32) for path in subject_plan.views_of(settings)]
    asked = [spec.triple for spec in others]
    wrong = next(
        t for t in triples(concepts=CONCEPTS) if t.concept not in {asked[0].concept, asked[2].concept}
    )
    first, second = subject_plan.variants_of(settings)[:2]
    made = {  # which views, and which scenes
        first: ([0, 1], (asked[0], wrong, asked[2], wrong)),
        second: ([2, 3], (wrong,) * 4),
    }
    store = Store(tmp_path)
    for variant, (seen, scenes) in made.items():
        images = [*(views[i] for i in seen), *(compose(triple, 5, 64).image for triple in scenes)]
        for spec, image in zip([*own, *others], images, strict=True):
            store.save(variant, 0, [spec], [image], Seconds(1.0, 1.0), "session")
    scores = subject_scores.load_scores(settings, torch.device("cpu"))
    figures, ceiling = subject.measure(store, [*made], views, settings, scores)
    features, count = efficientnet_lite0()(views), len(views)
    likeness = features @ features.T
    among = (likeness.sum() - count) / (count * (count - 1))
    assert ceiling["similarity"] == pytest.approx(among.item(), abs=1e-5)
    for variant, (seen, scenes) in made.items():
        hits = [scene.concept == triple.concept for scene, triple in zip(scenes, asked, strict=True)]
        assert figures[variant]["right"].tolist() == hits
        assert figures[variant]["similarity"] == pytest.approx(likeness[seen].mean(1).numpy(), abs=1e-5)
        assert figures[variant]["similarity"].mean() > ceiling["similarity"]  # each image is itself a view


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--subject", "no/such"), "--subject = no/such: there is no such folder"),
        (("--subject", "ONE"), "holds 1 image; 2 views or more can be compared"),
        (("--images", "1"), "--images = 1: pass 2 or more"),
        (("--learning-rate", "0"), "--learning-rate = 0: pass more than 0"),
        (("--model", "x/y"), "subject: the bundled subject is for the toy model; give --subject"),
        (("--out", "/proc/no/such"), "choose another place with --out"),
    ],
)
def test_wrong_settings_are_one_message_and_exit_code_2(arguments, message, tmp_path):
    folders = {"ONE": tmp_path / "one"}
    folders["ONE"].mkdir()
    Image.new("RGB", (8, 8)).save(folders["ONE"] / "one.png")
    option, value = arguments
    assert message in invoke("--out", tmp_path / "out", option, folders.get(value, value), code=2)


def test_the_views_that_ship():
    images = [Image.open(path) for path in find_images(SUBJECT)]
    assert 4 <= len(images) <= 6
    assert {(image.size, image.mode) for image in images} == {((128, 128), "RGB")}
    assert len({image.tobytes() for image in images}) == len(images)
    known = {r.image.tobytes() for r in load_references(trained_only=False)}
    assert not known & {image.tobytes() for image in images}


def test_a_view_scales_turns_mirrors_and_shifts():
    spec = Image.new("RGBA", (64, 64), "red")
    spec.paste("blue", (32, 0, 64, 64))  # red to the left

    def colours(places, degrees=0, mirrored=False, shift=(0, 0)):
        view = View(0.5, degrees, mirrored, shift, "#00ff00").draw(spec)
        assert (view.size, view.mode) == ((128, 128), "RGB")
        return "".join("RGB"[np.argmax(view.getpixel((2 * x, 2 * y)))] for x, y in places)

    sides = (20, 32), (44, 32)
    assert colours([*sides, (8, 32), (32, 60)]) == "RBGG"
    assert colours(sides, mirrored=True) == "BR"
    assert colours([(32, 44), (32, 20)], degrees=90) == "RB"  # counterclockwise: the left goes down
    assert colours([(36, 16), (60, 16), (12, 16), (36, 48)], shift=(0.25, -0.25)) == "RBGG"
