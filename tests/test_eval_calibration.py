"""`agentsd-eval calibrate`: its file is what the API finds, and a goal is asked for before any work."""

from functools import partial

import commands
import pytest
from agentsd_eval import calibrate
from agentsd_eval.images import models
from agentsd_eval.studies import calibration
from agentsd_eval.studies.calibration import note

from agentsd import Recipe, StepCache

GOAL = ("--speedup", 1.1)


invoke = partial(commands.invoke, "calibrate")


def test_the_command_saves_what_the_call_finds_and_goes_on(model_folder, tmp_path, monkeypatch):
    path = tmp_path / "mine.json"
    few = partial(calibrate, candidates=[Recipe(steps=StepCache(2)), Recipe(steps=StepCache(3))])
    monkeypatch.setattr(calibration, "calibrate", few)
    printed = invoke(
        "--model", model_folder, "--prompt", "a cat", "--prompt", "a dog", "--held-out", 1, "--steps", 8,
        "--scheduler", "ddim", "--cost", "seconds", "--reference-steps", 10, "--max-distance", 10,
        "--out", path,
    )  # fmt: skip
    found = Recipe.load(path)
    pipe = models.load_pipeline(models.Settings(model=model_folder, scheduler="ddim"))
    same = {"num_inference_steps": 8, "height": 32, "width": 32, "reference_steps": 10, "cost": "seconds"}
    goal = {"held_out": ["a dog"], "max_distance": 10, "resume": path.with_suffix(".jsonl")}
    resumed = few(pipe, ["a cat"], **goal, **same)
    assert (resumed, resumed.measured) == (found, found.measured)
    validation = found.measured["validation"]
    assert (validation["prompts"], validation["held_out"]) == (1, True)
    for told in (
        f"{found.measured['steps']} (8 calls: ",
        f"{validation['speedup']:.3f}x",
        *(f"baseline, {row['steps']} steps" for row in validation["fewer_steps"]),
        f"{validation['baseline_reference_distance']:.3g}",
        "Measured on 1 held-out prompts. Chosen on: a cat",
        str(path),
    ):
        assert told in printed


def test_prompts_are_the_embedded_models_if_none_are_given(monkeypatch, model_folder, tmp_path):
    given = {}

    def keep(pipe, prompts, **settings):
        given.update(settings, prompts=prompts)
        raise ValueError("enough")

    monkeypatch.setattr(calibration, "calibrate", keep)
    earlier = Recipe(steps=StepCache(), measured={"steps": "Ff"}).save(tmp_path / "calls.json")
    words = ("--model", model_folder, "--images", 3, "--held-out", 1, *GOAL, "--out", earlier)
    assert "enough" in invoke(*words, code=2)
    assert (len(given["prompts"]), len(given["held_out"])) == (2, 1)


@pytest.mark.parametrize("content", ["notes", '{"version": 1, "steps": {}}'])
def test_a_file_that_no_calibration_wrote_stays_as_it_is(content, monkeypatch, tmp_path):
    monkeypatch.setattr(calibration, "load_pipeline", lambda settings: pytest.fail("loaded"))
    path = tmp_path / "mine.json"
    path.write_text(content)
    printed = invoke(*GOAL, "--out", path, code=2)
    assert "mine.json was written by no calibration and stays as it is; choose another --out" in printed
    assert path.read_text() == content


def test_fewer_steps_are_advised_where_they_win():
    rows = [{"steps": n, "sampler": name, "distance": 1 / n} for n, name in ((4, None), (5, "unipckarras"))]
    validation = {"fewer_steps": rows, "prompts": 2, "held_out": False, "beaten_by_fewer_steps": True}
    measured = {"validation": validation, "environment": {"prompts": ["a cat"]}}
    told = note(Recipe.from_mapping({"version": 1, "attention": {"merge": {}}, "measured": measured}))
    assert "end nearer to the baseline at this cost: use the baseline, 5 steps of unipckarras." in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give one goal"),
        ((*GOAL, "--max-distance", 0.1), "give one goal"),
        (("--speedup", 0.9), "speedup"),
        ((*GOAL, "--prompt", "a cat", "--held-out", 1), "--held-out = 1 of 1 prompts: leave one"),
    ],
)
def test_a_wrong_goal_is_one_message_before_the_model_is_loaded(arguments, message, monkeypatch, tmp_path):
    monkeypatch.setattr(calibration, "load_pipeline", lambda settings: pytest.fail("loaded"))
    assert message in invoke(*arguments, "--out", tmp_path / "mine.json", code=2)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_calibrated_is_one_message(model_folder, tmp_path):
    printed = invoke(
        "--model", model_folder, *GOAL, "--steps", 5, "--out", tmp_path / "new" / "mine.json", code=2
    )
    assert "a run of 5 steps has none to spare" in printed
    assert not list(tmp_path.iterdir())
