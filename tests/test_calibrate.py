"""The recipe that calibration chooses, its metrics against runs of our own, its file, and what it refuses."""

import random
import time
from contextlib import suppress

import accelerate
import pytest
import torch
from agentsd_eval.calibration import search
from agentsd_eval.calibration.candidates import CANDIDATES as USUAL
from agentsd_eval.calibration.runs import Runs
from agentsd_eval.calibration.search import BETTER_SAMPLER, calibrate, distance_at, has_better_sampler
from agentsd_eval.environment import cpu_model
from calibrating import CANDIDATES, COUNTED, SETTINGS, STEPS, counted, distance, run
from diffusers import DDIMScheduler, EDMEulerScheduler, LCMScheduler, UniPCMultistepScheduler
from random_state import untouched
from recipes import AGENTS_CACHED, AGENTS_THEN_KEYS, STEP_CACHING
from tiny import BETAS, may_skip, snapshot

from agentsd import Downsample, Merge, Recipe, StepCache, apply_agentsd
from agentsd.modules import FocusedLinear
from agentsd.recipe import FAST


def found_by(pipe, prompts=("a cat",), **changes):
    return calibrate(pipe, list(prompts), **COUNTED | {"speedup": 1.3} | changes)


@pytest.fixture(scope="module")
def known(make_plain):
    """The speed-up and distance of each candidate on "a cat"."""
    pipe = make_plain()
    baseline, unpatched = counted(pipe)
    figures = {}
    for recipe in CANDIDATES:
        with apply_agentsd(pipe, recipe=recipe):
            latents, macs = counted(pipe)
        figures[recipe] = unpatched / macs, distance(latents, baseline)
    return figures


def test_no_other_candidate_that_is_fast_enough_ends_nearer(plain, known, calibrated, tmp_path):
    found = calibrated[1]
    fast = {recipe: far for recipe, (speedup, far) in known.items() if speedup >= 1.3}
    assert 1 < len(fast) < len(CANDIDATES)
    assert found == min(fast, key=fast.get)
    search = found.measured["search"]
    assert (search["speedup"], search["distance"]) == pytest.approx(known[found], rel=1e-3)
    assert found.measured["goal"] == {"speedup": 1.3}
    with apply_agentsd(plain, recipe=found) as handle:
        run(plain)
        assert found.measured["steps"] == handle.summary().split()[0]
    again = Recipe.load(found.save(tmp_path / "mine.json"))
    assert (again, again.measured) == (found, found.measured)


def test_validation_metrics_are_those_of_held_out_prompts(plain, calibrated):
    found = calibrated[1]
    validation = found.measured["validation"]
    baseline, unpatched = counted(plain, "a dog", 1)
    reference = run(plain, "a dog", 1, num_inference_steps=COUNTED["reference_steps"])

    def assert_of(row, latents):
        assert row["distance"] == pytest.approx(distance(latents, baseline), rel=1e-3)
        assert row["reference_distance"] == pytest.approx(distance(latents, reference), rel=1e-3)

    with apply_agentsd(plain, recipe=found):
        assert_of(validation, run(plain, "a dog", 1))
    expected = pytest.approx(distance(baseline, reference), rel=1e-3)
    assert validation["baseline_reference_distance"] == expected
    assert (validation["prompts"], validation["held_out"]) == (1, True)
    ours = plain.scheduler
    better = UniPCMultistepScheduler.from_config(ours.config, solver_order=2, use_karras_sigmas=True)
    lines = {None: [], BETTER_SAMPLER: []}
    for row in validation["fewer_steps"]:
        plain.scheduler = better if row["sampler"] else ours
        fewer, macs = counted(plain, "a dog", 1, num_inference_steps=row["steps"])
        assert_of(row, fewer)
        assert row["speedup"] == pytest.approx(unpatched / macs)
        lines[row["sampler"]].append(row)
    assert all(lines.values())
    beaten = min(distance_at(validation["speedup"], line, "reference_distance") for line in lines.values())
    assert validation["beaten_by_fewer_steps"] == (beaten <= validation["reference_distance"])
    environment = found.measured["environment"]
    assert environment["num_inference_steps"] == STEPS
    assert environment["scheduler"] == "DDIMScheduler"
    assert (environment["device"], environment["threads"]) == (cpu_model(), torch.get_num_threads())
    assert {"agentsd", "torch", "diffusers"} <= set(environment["versions"])


def test_a_better_sampler_is_another_on_the_same_noise_schedule():
    assert has_better_sampler(DDIMScheduler())
    assert has_better_sampler(UniPCMultistepScheduler())
    assert not has_better_sampler(UniPCMultistepScheduler(use_karras_sigmas=True))
    assert not has_better_sampler(EDMEulerScheduler())


@pytest.mark.parametrize(("speedup", "expected"), [(4, 0.4), (2, 0.2), (8 / 3, 0.3), (5, 0.4), (1.5, 0.2)])
def test_fewer_steps_are_compared_at_the_recipes_cost(speedup, expected):
    rows = [{"speedup": 4, "distance": 0.4}, {"speedup": 2, "distance": 0.2}]
    assert distance_at(speedup, rows, "distance") == pytest.approx(expected)


def test_another_goal_takes_the_same_runs(plain, known, figures):
    before, calls = snapshot(plain.unet), []

    hook = plain.unet.conv_in.register_forward_hook(may_skip(lambda *args: calls.append(1)))
    limit = sorted(far for _, far in known.values())[-2] * 1.001
    found = found_by(plain, speedup=None, max_distance=limit, resume=figures)
    hook.remove()
    assert snapshot(plain.unet) == before
    assert found == max((r for r, (_, far) in known.items() if far <= limit), key=lambda r: known[r][0])
    assert len(calls) < 5 * STEPS  # of the new recipe and of fewer steps, on the held-out prompt


def test_what_is_found_meets_the_goal_however_the_metrics_lie():
    """Against all candidates: met on all prompts, and of three at least the best."""
    rng, seen = random.Random(2), 0

    class Known:
        def compare(self, recipe, numbers):
            return figures[recipe][len(numbers) > 1]

    def metrics():
        return {"speedup": rng.uniform(1.1, 2), "distance": rng.random()}

    for _ in range(300):
        candidates = [Recipe(Downsample(), seed=seed) for seed in range(rng.randrange(1, 20))]
        figures = {recipe: (metrics(), metrics()) for recipe in candidates}
        with suppress(ValueError):
            found = search._search(Known(), candidates, range(3), 1.5, None)
            first, every = figures[found]
            assert every["speedup"] >= 1.5 <= first["speedup"]
            seen += 1
        with suppress(ValueError):
            found = search._search(Known(), candidates, range(3), None, 0.5)
            assert figures[found][1]["distance"] <= 0.5
    assert seen > 100
    figures = dict.fromkeys(candidates, ({"speedup": 1.4, "distance": 0.7},) * 2)
    with pytest.raises(ValueError, match=r"speedup=1\.5 cannot be met .*: the greatest seen is 1\.40"):
        search._search(Known(), candidates, range(2), 1.5, None)
    with pytest.raises(ValueError, match=r"max_distance=0\.5 cannot be met .*: the least seen is 0\.7"):
        search._search(Known(), candidates, range(2), None, 0.5)


def test_seconds_may_be_the_cost(plain, monkeypatch):
    """By a clock that shows 2 s for the last layer of a pass, and 14 s for a deep one."""
    shown = 0.0

    def pass_by(seconds):
        nonlocal shown
        shown += seconds

    monkeypatch.setattr(time, "process_time", lambda: shown)
    plain.unet.conv_out.register_forward_hook(may_skip(lambda m, args, out: pass_by(2 * len(args[0]))))
    deep = plain.unet.down_blocks[1].resnets[0]
    deep.register_forward_hook(may_skip(lambda m, args, out: pass_by(14 * len(args[0]))))
    found = calibrate(plain, ["a cat"], speedup=1.4, cost="seconds", candidates=CANDIDATES[:3], **SETTINGS)
    steps = found.measured["steps"]
    again = steps.rstrip("f").count("f")
    seconds = 32 * steps.count("F") + 4 * (steps.count("f") + again)
    assert found.measured["search"]["speedup"] == pytest.approx(32 * STEPS / seconds)


def test_the_named_recipes_are_candidates():
    assert {AGENTS_CACHED, FAST, STEP_CACHING} <= set(USUAL)
    assert len(set(USUAL)) == len(USUAL)


def test_conditions_beside_the_prompt_are_passed_on(plain, tmp_path):
    """And what is measured under one is not taken for another."""
    path = tmp_path / "measured"
    arguments = {"speedup": 1.1, "candidates": CANDIDATES[:1], "resume": path} | SETTINGS
    for words, count in (("rain", 1), ("snow", 2)):
        with untouched():  # the user's random state
            assert calibrate(plain, ["a cat"], negative_prompt=words, **arguments) == CANDIDATES[0]
        assert path.read_text().count("plain 0") == count


def test_what_was_stopped_goes_on(plain, calibrated, tmp_path):
    (path, found), place = calibrated, 6
    lines, before = path.read_text().splitlines(True), snapshot(plain.unet)
    part = tmp_path / "part.jsonl"
    part.write_text("".join(lines[:place]))

    def stop(*args):
        if len(part.read_text().splitlines()) > place:
            raise KeyboardInterrupt

    hook = plain.unet.conv_in.register_forward_hook(may_skip(stop))
    with pytest.raises(KeyboardInterrupt):
        found_by(plain, resume=part)
    hook.remove()
    assert snapshot(plain.unet) == before
    again = found_by(plain, resume=part)
    assert (again, again.measured) == (found, found.measured)
    assert part.read_text() == path.read_text()


def test_nothing_is_taken_from_measurements_of_something_else(plain, figures):
    class Run(Exception):
        pass

    def run(*args):
        raise Run

    plain.unet.conv_in.register_forward_hook(may_skip(run))
    found_by(plain, resume=figures)  # all is known
    for change in ({"seed": 1}, {"prompts": ["a car"]}, {"height": 64}):
        with pytest.raises(Run):
            found_by(plain, resume=figures, **change)
    torch.nn.init.ones_(plain.unet.conv_in.bias)
    with pytest.raises(Run):
        found_by(plain, resume=figures)


@pytest.mark.parametrize("content", ["[1]\n", "none", '{"of": {}}\n{}\n', '{"of": "a", "na'])
def test_a_file_of_another_kind_is_left_as_it_is(plain, tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"notes.txt' is no calibration's: pass another"):
        calibrate(plain, ["a cat"], speedup=1.5, resume=path)
    assert path.read_text() == content
    with pytest.raises(ValueError, match="Is a directory; pass a file's path"):
        calibrate(plain, ["a cat"], speedup=1.5, resume=tmp_path)


@pytest.fixture
def never_run(plain, monkeypatch):
    monkeypatch.setattr(type(plain), "__call__", lambda *args, **kwargs: pytest.fail("it was run"))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"speedup": None}, ValueError, "speedup=None, max_distance=None: give one goal"),
        ({"max_distance": 0.1}, ValueError, "speedup=1.5, max_distance=0.1: give one goal"),
        ({"speedup": 1.0}, ValueError, r"speedup=1\.0: pass more than 1"),
        ({"speedup": None, "max_distance": -1}, ValueError, "max_distance=-1: pass more than 0"),
        ({"prompts": []}, ValueError, r"prompts=\[\]: pass a list"),
        ({"held_out": "a dog"}, ValueError, "held_out='a dog': pass a list"),
        ({"held_out": ["a cat"]}, ValueError, r"held_out=\['a cat'\]: they are among the prompts"),
        ({"cost": "flops"}, ValueError, "cost='flops': choose 'macs' or 'seconds'"),
        ({"candidates": [Recipe(FocusedLinear())]}, ValueError, r"FocusedLinear\(.*: it is to be trained"),
        ({"candidates": [Merge()]}, TypeError, r"Merge\(.* is a Merge: pass recipes"),
        ({"reference_steps": 9}, ValueError, "reference_steps=9: pass more than num_inference_steps=25"),
        ({"num_inference_steps": 5}, ValueError, "nothing can be cached .* a run of 5 steps has none"),
        ({"timesteps": [1, 2]}, ValueError, r"timesteps=\[1, 2\]: leave it out"),
    ],
)
def test_wrong_arguments_are_named_before_any_run(plain, never_run, changes, error, message):
    before = snapshot(plain.unet)
    with pytest.raises(error, match=message):
        calibrate(plain, **{"prompts": ["a cat"], "speedup": 1.5} | changes)
    assert snapshot(plain.unet) == before


def put_a_strange_processor(pipe):
    strange = type("Strange", (), {"__call__": lambda *args: None})()
    pipe.unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1.set_processor(strange)


LCM = LCMScheduler(**BETAS, steps_offset=1)
UNFIT = {
    "patched": (lambda pipe: apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS), r"remove_agentsd\(pipe\) first"),
    "of few steps": (lambda pipe: pipe.register_modules(scheduler=LCM), "LCMScheduler is for few steps"),
    "of others": (put_a_strange_processor, "down_blocks.* has a Strange, which may have to see each call"),
    "offloaded": (lambda pipe: accelerate.cpu_offload(pipe.unet), "sequential offloading: calibrate first"),
    "compiled": (lambda pipe: pipe.unet.compile(), "calibrate first, and compile it afterwards"),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_a_model_that_cannot_be_calibrated_is_refused_before_any_run(plain, never_run, kind):
    prepare, message = UNFIT[kind]
    prepare(plain)
    with pytest.raises(ValueError, match=message):
        calibrate(plain, ["a cat"], speedup=1.5)


def test_a_unet_alone_is_no_pipeline(plain):
    with pytest.raises(TypeError, match="is no pipeline with a `unet`"):
        calibrate(plain.unet, ["a cat"], speedup=1.5)


def test_a_goal_far_out_of_reach_is_told_after_the_boldest_candidate(plain, monkeypatch):
    seen, compare = [], Runs.compare
    monkeypatch.setattr(Runs, "compare", lambda *args: seen.append(args[1]) or compare(*args))
    bold, careful = Recipe(steps=StepCache(4)), Recipe(steps=StepCache(2, warmup_steps=4))
    before = snapshot(plain.unet)
    with pytest.raises(ValueError, match=r"speedup=99 cannot be met .*: the greatest seen is \d\.\d\d"):
        calibrate(plain, ["a cat", "a dog"], speedup=99, candidates=[careful, bold], **SETTINGS)
    assert seen == [bold]
    assert snapshot(plain.unet) == before
