"""The study of a finetuned subject: its figures, its command, and the views that ship."""

from __future__ import annotations

import csv
import json
import re
import statistics
from pathlib import Path
from typing import Any

import agentsd_demo
import agentsd_demo.data
import agentsd_demo.scenes
import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from agentsd_demo import SUBJECT, load_references
from agentsd_demo.reading import ConceptReader, read_scene
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
from click.testing import CliRunner
from PIL import Image
from rich.console import Console

from agentsd import Agents, Merge, Phases, Recipe
from agentsd.dreambooth import training
from agentsd.dreambooth.data import find_images
from agentsd.progress import progress

CONCEPTS = ["strawberry", "panda face", "carrot"]


@pytest.fixture(autouse=True)
def few_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three concepts to be nearest to, so that features take no time; no precision of another test."""
    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setattr(agentsd_demo.scenes, "triples", lambda split: triples(split, CONCEPTS)[::7])
    monkeypatch.setattr(agentsd_demo.data, "trained_concepts", lambda: CONCEPTS)


@pytest.fixture
def tiny_demo(make_pipeline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny pipeline in the place of the toy model."""

    def load(dtype: torch.dtype = torch.float32, device: Any = "cpu") -> Any:
        return make_pipeline().to(device, dtype)

    monkeypatch.setattr(agentsd_demo, "load_pipeline", load)
    monkeypatch.setattr("agentsd.demo.load_pipeline", load)


def test_similarity_is_the_mean_cosine() -> None:
    features, views = np.array([[3.0, 0.0], [1.0, 1.0]]), np.array([[1.0, 0.0], [0.0, 2.0]])
    assert subject_scores.similarity(features, views) == pytest.approx([0.5, 0.5**0.5])
    # pairs of the three: 0, 1/sqrt(2), 1/sqrt(2)
    assert subject_scores.similarity_among(np.array([[1.0, 0], [0, 2], [1, 1]])) == pytest.approx(
        2 / 3 * 0.5**0.5
    )


def test_agents_generate_as_they_were_trained() -> None:
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


def test_changes_are_against_the_baseline_of_the_same_prior(tmp_path: Path) -> None:
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


def invoke(*arguments: Any, code: int = 0) -> str:
    """Run the command; return what it printed, blanks made one."""
    result = CliRunner().invoke(main, ["subject", *(str(argument) for argument in arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return re.sub(r"\s+", " ", result.output)


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "subject.jsonl").read_text().splitlines()]


def assert_figures_are_those_of_the_images(rows: list[dict[str, Any]], settings: SubjectSettings) -> None:
    """Similarity, accuracy, seconds and speed-up of each row, from its images and its manifest."""
    network = efficientnet_lite0()
    reader = ConceptReader(CONCEPTS, network)
    views = network([subject_plan.as_trained(path, 32) for path in subject_plan.views_of(settings)])
    variants = subject_plan.variants_of(settings)
    _, others = subject_plan.specs_of(settings)

    def made(variant: subject_plan.Variant) -> tuple[list[Image.Image], dict[int, dict[str, Any]]]:
        paths = [Store(settings.out).path(variant, index) for index in range(4)]
        lines = paths[0].with_name("manifest-0.jsonl").read_text().split("\n")
        return [Image.open(path) for path in paths], {
            x["index"]: x for x in map(json.loads, filter(None, lines))
        }

    for row, variant in zip(rows, variants, strict=True):
        images, lines = made(variant)
        _, baseline = made(variants[0])  # before finetuning
        assert row["similarity"] == pytest.approx((network(images[:2]) @ views.T).mean().item(), abs=1e-5)
        named = [reader.read(image, read_scene(image))[0] for image in images[2:]]
        right = [name == spec.triple.concept for name, spec in zip(named, others, strict=True)]
        assert row["right"] == np.mean(right)
        assert row["seconds"] == statistics.median(line["seconds"] for line in lines.values())
        ratios = [baseline[i]["cpu_seconds"] / lines[i]["cpu_seconds"] for i in range(4)]
        assert row["speedup"] == pytest.approx(statistics.median(ratios))


def test_the_command_trains_once_and_goes_on(
    tiny_demo: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    tiny = (
        "--train-steps", 1, "--learning-rate", 1e-3, "--class-images", 1,
        "--images", 2, "--other-prompts", 2, "--steps", 2, "--out", out,
    )  # fmt: skip
    printed = invoke(*tiny)
    assert "the subject" in printed
    rows = read(out)
    assert [row.get("prior") for row in rows] == [False] * 5 + [True] * 4 + [None]
    given = SubjectSettings(train_steps=1, images=2, other_prompts=2, steps=2, out=out)
    assert_figures_are_those_of_the_images(rows[:-1], given)
    assert [row.get("similarity_change") is None for row in rows] == [
        False, True, False, False, False, True, False, False, False, True,
    ]  # fmt: skip
    with (out / "subject.csv").open(newline="") as file:
        assert [float(row["similarity"]) for row in csv.DictReader(file)] == [r["similarity"] for r in rows]
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
    assert [row["similarity"] for row in read(out)] == [row["similarity"] for row in rows]
    (out / "baseline" / "trained.json").unlink()
    printed = invoke(*tiny, "--learning-rate", 2e-3, code=2)
    assert "(learning_rate: 0.001 there, 0.002 now); choose another --out" in printed


def test_a_killed_training_goes_on(tiny_demo: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SubjectSettings(train_steps=3, steps=2, out=tmp_path, subject=SUBJECT)
    config = subject_plan.training_config("agents", settings)
    monkeypatch.setattr(
        subject, "training_config", lambda *_: config.model_copy(update={"checkpointing_steps": 2})
    )
    step, steps = training.Run._optimise, []

    def until_killed(run: Any, *args: Any) -> float:
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


def test_images_are_judged_by_views_and_references(make_pipeline: Any, tmp_path: Path) -> None:
    settings = SubjectSettings(images=2, other_prompts=4, out=tmp_path)
    own, others = subject_plan.specs_of(settings)
    assert [spec.index for spec in (*own, *others)] == list(range(6))
    assert len({spec.seed for spec in (*own, *others)}) == 6
    views = subject_plan.views_of(settings)
    asked = [spec.triple for spec in others]
    wrong = next(
        t for t in triples(concepts=CONCEPTS) if t.concept not in {asked[0].concept, asked[2].concept}
    )
    pipe = make_pipeline()  # of 32x32 pixels, which the views are brought to
    images = [subject_plan.as_trained(path, 32) for path in views[:2]]
    images += [compose(triple, 5, 64).image for triple in (asked[0], wrong, asked[2], wrong)]
    variant = subject_plan.variants_of(settings)[0]
    store = Store(tmp_path)
    for spec, image in zip([*own, *others], images, strict=True):
        store.save(variant, 0, [spec], [image], Seconds(1.0, 1.0), "session")
    scores = subject_scores.load_scores(settings, pipe.unet.device)
    shown = [subject_plan.as_trained(path, 32) for path in views]
    figures, ceiling = subject.measure(store, [variant], shown, settings, scores)
    found = figures[variant]
    features = efficientnet_lite0()
    hits = [1, asked[1].concept == wrong.concept, 1, asked[3].concept == wrong.concept]
    assert found["right"].tolist() == hits
    of_views = features([subject_plan.as_trained(path, 32) for path in views])
    assert found["similarity"] == pytest.approx((of_views[:2] @ of_views.T).mean(1).numpy(), abs=1e-5)
    count = len(views)
    among = ((of_views @ of_views.T).sum() - count) / (count * (count - 1))
    assert ceiling["similarity"] == pytest.approx(among.item(), abs=1e-5)
    assert found["similarity"].mean() > ceiling["similarity"]  # one of the views each is the image itself


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--subject", "no/such"), "--subject = no/such: there is no such folder"),
        (("--subject", "ONE"), "holds 1 image; 2 views or more can be compared"),
        (("--images", "1"), "--images = 1: pass 2 or more"),
        (("--learning-rate", "0"), "--learning-rate = 0: pass more than 0"),
        (("--model", "EMPTY"), "subject: the bundled subject is for the toy model; give --subject"),
        (("--out", "/proc/no/such"), "choose another place with --out"),
    ],
)
def test_wrong_settings_are_one_message_and_exit_code_2(
    arguments: tuple[str, str], message: str, tmp_path: Path
) -> None:
    folders = {"ONE": tmp_path / "one", "EMPTY": tmp_path / "empty"}
    for folder in folders.values():
        folder.mkdir()
    Image.new("RGB", (8, 8)).save(folders["ONE"] / "one.png")
    option, value = arguments
    place = () if option == "--out" else ("--out", tmp_path / "out")
    printed = invoke(option, folders.get(value, value), *place, code=2)
    assert message in printed
    assert "Traceback" not in printed


def test_the_views_that_ship() -> None:
    images = [Image.open(path) for path in find_images(SUBJECT)]
    assert 4 <= len(images) <= 6
    assert {(image.size, image.mode) for image in images} == {((64, 64), "RGB")}
    assert len({image.tobytes() for image in images}) == len(images)
    known = {r.image.tobytes() for r in load_references(trained_only=False)}
    assert not known & {image.tobytes() for image in images}


def test_a_view_scales_turns_mirrors_and_shifts() -> None:
    spec = Image.new("RGBA", (64, 64), "red")
    spec.paste("blue", (32, 0, 64, 64))  # red to the left

    def pixels(scale: float, degrees: float, mirrored: bool, shift: tuple[float, float]) -> Any:
        view = View(scale, degrees, mirrored, shift, "#00ff00").draw(spec)
        assert (view.size, view.mode) == ((64, 64), "RGB")
        return lambda x, y: "RGB"[int(torch.tensor(view.getpixel((x, y))).argmax())].replace("G", "-")

    at = pixels(0.5, 0, False, (0, 0))
    assert at(20, 32) + at(44, 32) + at(8, 32) + at(32, 60) == "RB--"
    at = pixels(0.5, 0, True, (0, 0))
    assert at(20, 32) + at(44, 32) == "BR"
    at = pixels(0.5, 90, False, (0, 0))  # counterclockwise: the left goes down
    assert at(32, 44) + at(32, 20) == "RB"
    at = pixels(0.5, 0, False, (0.25, -0.25))
    assert at(36, 16) + at(60, 16) + at(12, 16) + at(36, 48) == "RB--"
