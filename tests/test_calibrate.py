"""Calibration against figures counted here: by patching, by brute force, and by a loop over tables."""

import itertools
import random
import time
from contextlib import nullcontext, suppress

import pytest
import torch
from diffusers import (
    EulerDiscreteScheduler,
    StableDiffusionControlNetPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionXLPipeline,
)
from tiny import PICTURE, make_controlnet, make_unet, sdxl_parts, sdxl_unet, snapshot

from agentsd import (
    Agents,
    Downsample,
    Merge,
    Phases,
    PooledAgents,
    Recipe,
    ReuseSteps,
    apply_agentsd,
    calibrate,
    remove_agentsd,
)
from agentsd.calibration.cost import multiply_adds
from agentsd.calibration.replay import Figures
from agentsd.calibration.search import OPERATORS, _best_by_saving, _meeting
from agentsd.modules import FocusedLinear
from agentsd.recipe import FAST

PROMPTS = ["a cat", "a dog on a mat"]
MERGE = Merge(0.5, ranking="layer")
AGENTS = Agents(0.0, at_most=None, agent_ratio=0.95, ranking="layer")
COUNTED = {"cost": "multiply_adds", "num_inference_steps": 3, "calls": 3, "operators": (MERGE, AGENTS)}


@pytest.fixture
def small(make_pipeline):
    """A pipeline whose U-Net has three self-attention layers, of 256 tokens each."""
    unet = make_unet(
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D", "CrossAttnUpBlock2D"),
        mid_block_type=None,
    )
    return make_pipeline(unet)


def stock_calls(pipe, prompts, calls, **settings):
    """(args, kwargs, output) of the U-Net calls in the middle of `calls` equal parts of each run."""
    kept = []
    for seed, prompt in enumerate(prompts):
        seen = []
        hook = pipe.unet.register_forward_hook(
            lambda m, args, kwargs, out, seen=seen: seen.append(([a.clone() for a in args], kwargs, out[0])),
            with_kwargs=True,
        )
        pipe(prompt, generator=torch.Generator().manual_seed(seed), output_type="latent", **settings)
        hook.remove()
        kept += [seen[(2 * j + 1) * len(seen) // (2 * calls)] for j in range(calls)]
    return kept


def patched(target, recipe):
    """A model under a recipe, or as it is."""
    return nullcontext() if recipe is None else apply_agentsd(target, recipe=recipe)


def changes_of(target, calls, recipe, scale=7.5):
    """(sum of squares of the guided output's changes, sum of its squares), patched as a user does."""
    moved = power = 0.0
    for args, kwargs, expected in calls:
        with torch.no_grad(), patched(target, recipe):
            output = getattr(target, "unet", target)(*args, **kwargs)[0]
        out, stock = (
            scale * x[1:].double() - (scale - 1) * x[:1].double() if scale else x.double()
            for x in (output, expected)
        )
        moved += float((out - stock).square().sum())
        power += float(stock.square().sum())
    return moved, power


def work_of(target, calls, recipe=None):
    """Multiply-adds of all calls."""
    unet = getattr(target, "unet", target)
    with torch.no_grad(), patched(target, recipe):
        return sum(multiply_adds(lambda call=call: unet(*call[0], **call[1])) for call in calls)


def figures_of(pipe, calls, recipe, scale=7.5):
    """(error, speedup) of a recipe on calls."""
    moved, power = changes_of(pipe, calls, recipe, scale)
    return moved / power, work_of(pipe, calls) / work_of(pipe, calls, recipe)


@pytest.mark.filterwarnings("ignore:agentsd. this run has no early step")  # each call opens a run here
@pytest.mark.parametrize(("karras", "goal"), [(False, {"speedup": 1.03}), (True, {"max_error": 3e-5})])
def test_the_goal_is_met_as_measured_by_patching(pipe, karras, goal):
    """Karras's steps crowd at the end: phases read without the scheduler's list would be others."""
    if karras:
        pipe.scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config, use_karras_sigmas=True)
    found = calibrate(pipe, PROMPTS, **goal, **COUNTED)
    calls = stock_calls(pipe, PROMPTS, 3, num_inference_steps=3)
    error, speedup = figures_of(pipe, calls, found)
    assert found.measured["error"] == pytest.approx(error, rel=1e-3)
    assert found.measured["speedup"] == pytest.approx(speedup, rel=1e-9)
    assert tuple(found.measured["base"].values()) == pytest.approx(figures_of(pipe, calls, FAST), rel=1e-3)
    assert (found.measured["calls"], found.measured["prompts"]) == (6, PROMPTS)
    if "speedup" in goal:
        assert 1.03 <= speedup < 1.035
    else:
        assert 0 < error <= 3e-5


def test_near_the_best_of_all_combinations(small):
    """All 27 x 27 are run, phase by phase; the phases' calls are others, so their figures add up."""
    calls = stock_calls(small, PROMPTS[:1], 3, num_inference_steps=3)
    with apply_agentsd(small) as handle:
        names = handle.layer_names
    stays = Phases(None, Downsample(), early_frac=1.0)
    phases = []
    for early in (True, False):
        part = [call for i, call in enumerate(calls) if (i == 0) == early]
        combos = [
            Recipe(layers=dict(zip(names, does, strict=True)))
            for does in itertools.product((stays, MERGE, AGENTS), repeat=3)
        ]
        phases.append(
            [
                (*changes_of(small.unet, part, combo), len(part) * work_of(small.unet, part[:1], combo))
                for combo in combos
            ]
        )
    stock = work_of(small, calls)
    both = [
        ((early[0] + late[0]) / (early[1] + late[1]), stock / (early[2] + late[2]))
        for early, late in itertools.product(*phases)
    ]
    for speedup in (1.03, 1.07):
        measured = calibrate(small, PROMPTS[:1], speedup=speedup, **COUNTED).measured
        best = min(error for error, gained in both if gained >= speedup)
        assert measured["speedup"] >= speedup
        assert best * (1 - 1e-3) <= measured["error"] <= 1.2 * best


def test_the_search_is_exact_where_figures_add_up():
    rng = random.Random(0)
    for _ in range(20):
        table = {
            (f"layer {i}", early): {
                None: Figures(0.0, 20.0),
                **{o: Figures(rng.uniform(0, 1), rng.randrange(5, 23)) for o in OPERATORS[:3]},
            }
            for i in range(2)
            for early in (True, False)
        }
        every = [
            (80 - sum(f.cost for f in combo), sum(f.error for f in combo))
            for combo in itertools.product(*(tried.values() for tried in table.values()))
        ]
        found = _best_by_saving(table, grain=1.0)
        figures = [
            (80 - sum(table[key][c].cost for key, c in picked.items()),
             sum(table[key][c].error for key, c in picked.items()))
            for picked in found
        ]  # fmt: skip
        assert figures == sorted(figures)
        for least in range(1, int(max(saved for saved, _ in every)) + 1):
            best = min(error for saved, error in every if saved >= least)
            assert next(error for saved, error in figures if saved >= least) == pytest.approx(best)


def test_what_is_returned_meets_the_goal_however_the_figures_lie():
    rng = random.Random(1)
    for _ in range(300):
        figures = [(rng.uniform(0, 1), rng.uniform(1, 2)) for _ in range(rng.randrange(1, 20))]
        for goal in ((1.5, None), (None, 0.5)):
            with suppress(ValueError):
                error, speedup = figures[_meeting(figures.__getitem__, len(figures), *goal)]
                assert speedup >= 1.5 if goal[0] else error <= 0.5
    with pytest.raises(ValueError, match=r"max_error=0\.5 cannot be met .*: nothing saves anything"):
        _meeting([].__getitem__, 0, None, 0.5)


def test_a_goal_out_of_reach_says_what_can_be_had(small):
    with pytest.raises(ValueError, match=r"speedup=9 cannot be met .* the greatest speedup 1\.\d") as raised:
        calibrate(small, PROMPTS[:1], speedup=9, **COUNTED)
    most = float(str(raised.value).rsplit(" ", 1)[1])
    found = calibrate(small, PROMPTS[:1], speedup=most - 1e-3, **COUNTED)
    assert found.measured["speedup"] == pytest.approx(most, abs=1e-3)
    assert set(found.layers.values()) == {AGENTS}
    with pytest.raises(ValueError, match=r"max_error=1e-12 cannot be met .* the least error is [1-9]"):
        calibrate(small, PROMPTS[:1], max_error=1e-12, **COUNTED)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"speedup": None}, ValueError, "speedup=None, max_error=None: give one goal"),
        ({"max_error": 0.1}, ValueError, "speedup=1.1, max_error=0.1: give one goal"),
        ({"speedup": 1.0}, ValueError, r"speedup=1\.0: pass more than 1"),
        ({"speedup": float("nan")}, ValueError, "speedup=nan: pass more than 1"),
        ({"speedup": None, "max_error": 0}, ValueError, "max_error=0: pass more than 0"),
        ({"prompts": []}, ValueError, r"prompts=\[\]: pass a list"),
        ({"prompts": "a cat"}, ValueError, "prompts='a cat': pass a list"),
        ({"calls": 0}, ValueError, "calls=0: pass 1 or more"),
        ({"cost": "flops"}, ValueError, "cost='flops': choose 'time' or 'multiply_adds'"),
        ({"base": "fast"}, ValueError, "base='fast': pass a recipe with attention, in phases or in every"),
        ({"base": Recipe(layers={"a": MERGE})}, ValueError, r"base=Recipe\(.*: pass a recipe with attention"),
        ({"base": Recipe(FocusedLinear())}, ValueError, r"FocusedLinear\(.*\) is to be trained: only what"),
        ({"base": Recipe(MERGE, steps=ReuseSteps())}, ValueError, "leave its steps and guidance out"),
        ({"operators": (MERGE, FocusedLinear())}, ValueError, r"FocusedLinear\(.*\) is to be trained: only"),
        ({"operators": ()}, ValueError, r"operators=\(\): pass a list of operators"),
        ({"operators": (Merge,)}, ValueError, r"operators=\(<class .*: pass a list of operators"),
        ({"output_type": "pil"}, TypeError, "output_type"),
    ],
)
def test_wrong_arguments_are_named(pipe, changes, error, message):
    before = snapshot(pipe.unet)
    with pytest.raises(error, match=message):
        calibrate(pipe, **{"prompts": PROMPTS, "speedup": 1.1, "num_inference_steps": 2} | changes)
    assert snapshot(pipe.unet) == before


def test_what_cannot_be_calibrated_is_refused_before_any_run(pipe, monkeypatch):
    monkeypatch.setattr(type(pipe), "__call__", lambda *args, **kwargs: pytest.fail("it was run"))
    for target in (pipe.unet, torch.nn.Linear(1, 1), make_unet):
        with pytest.raises(TypeError, match="is no pipeline with a `unet`"):
            calibrate(target, PROMPTS, speedup=1.1)
    apply_agentsd(pipe)
    with pytest.raises(ValueError, match=r"call remove_agentsd\(pipe\) first"):
        calibrate(pipe, PROMPTS, speedup=1.1)
    remove_agentsd(pipe)
    attn = pipe.unet.mid_block.attentions[0].transformer_blocks[0].attn1
    plain = attn.processor
    attn.set_processor(type("Strange", (), {"__call__": lambda *args: None})())
    with pytest.raises(ValueError, match=r"mid_block.* has a Strange"):
        calibrate(pipe, PROMPTS, speedup=1.1)
    attn.set_processor(plain)
    pipe.unet.compile()
    with pytest.raises(ValueError, match="calibrate first, and compile it afterwards"):
        calibrate(pipe, PROMPTS, speedup=1.1)


def test_the_pipeline_is_left_as_it_was(small, sample, tmp_path):
    before, stock = snapshot(small.unet), sample(small)
    found = calibrate(small, PROMPTS[:1], speedup=1.03, **COUNTED)
    assert snapshot(small.unet) == before
    assert torch.equal(sample(small), stock)
    assert found == calibrate(small, PROMPTS[:1], speedup=1.03, **COUNTED)  # nothing is left to chance
    again = Recipe.load(found.save(tmp_path / "recipe.yaml"))
    assert again == found
    assert again.measured == found.measured


@pytest.mark.parametrize("place", ["recording", "trial", "layer"])
def test_an_interruption_leaves_the_pipeline_as_it_was(small, sample, place):
    before, stock = snapshot(small.unet), sample(small)
    layer = small.unet.up_blocks[2].attentions[0].transformer_blocks[0].attn1
    settings, hooks = dict(COUNTED), []

    def stop(*args):
        raise KeyboardInterrupt

    def start_failing(done, total):
        if done == 3:
            hooks.append(layer.to_q.register_forward_hook(stop))

    if place == "recording":
        settings["callback_on_step_end"] = stop
    else:
        settings["on_step"] = stop if place == "trial" else start_failing
    with pytest.raises(KeyboardInterrupt):
        calibrate(small, PROMPTS, speedup=1.03, **settings)
    for hook in hooks:
        hook.remove()
    assert snapshot(small.unet) == before
    assert torch.equal(sample(small), stock)


def test_progress_counts_every_trial(small):
    told = []
    settings = COUNTED | {"operators": OPERATORS, "on_step": lambda *step: told.append(step)}
    calibrate(small, PROMPTS[:1], speedup=1.03, **settings)
    assert told == [(i + 1, 3 * 2 * (1 + len(OPERATORS))) for i in range(len(told))]
    assert len(told) == told[0][1]


@pytest.mark.filterwarnings("ignore:agentsd. this run has no early step")
def test_any_operator_is_a_choice_of_either_phase(small):
    operator = Downsample(at_most=None)
    found = calibrate(small, PROMPTS[:1], max_error=1.0, **COUNTED | {"operators": (operator,)})
    assert set(found.layers.values()) == {operator}
    calls = stock_calls(small, PROMPTS[:1], 3, num_inference_steps=3)
    error, speedup = figures_of(small, calls, Recipe(operator, levels=1))
    assert found.measured["error"] == pytest.approx(error, rel=1e-3)
    assert found.measured["speedup"] == pytest.approx(speedup, rel=1e-9)


@pytest.mark.filterwarnings("ignore:agentsd. this run has no early step")
def test_steps_and_seed_are_the_bases_and_settings_are_the_operators(small):
    base = Recipe(Phases(Agents(), Merge(0.2), early_frac=0.8), levels=1, seed=3)
    mine = (PooledAgents(9, k=0.0), Merge(0.3, stride=4, cells="random", ranking="layer"))
    found = calibrate(small, PROMPTS[:1], speedup=1.06, base=base, **COUNTED | {"operators": mine})
    assert (found.seed, found.levels, found.attention) == (3, None, None)
    assert set(found.operators) <= set(mine)
    assert found.timing.early_frac == 0.8
    calls = stock_calls(small, PROMPTS[:1], 3, num_inference_steps=3)
    assert tuple(found.measured["base"].values()) == pytest.approx(figures_of(small, calls, base), rel=1e-3)
    assert found.measured["error"] == pytest.approx(figures_of(small, calls, found)[0], rel=1e-3)


@pytest.mark.parametrize(("early_frac", "phase"), [(1.0, "early"), (0.0, "late")])
def test_runs_of_one_phase(small, early_frac, phase):
    base = FAST.with_settings(early_frac=early_frac)
    found = calibrate(small, PROMPTS[:1], speedup=1.05, base=base, **COUNTED)
    other = {"early": "late", "late": "early"}[phase]
    for phases in found.layers.values():
        assert getattr(phases, phase) in (MERGE, AGENTS)
        assert getattr(phases, other) is None
        assert phases.early_frac == early_frac


def test_a_short_img2img_run_has_no_early_call(small):
    pipe = StableDiffusionImg2ImgPipeline(**small.components, requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)
    image = {"image": torch.zeros(1, 3, 32, 32), "strength": 0.5}
    found = calibrate(pipe, PROMPTS[:1], speedup=1.05, **COUNTED | image)
    assert found.measured["calls"] == 2
    assert {phases.early for phases in found.layers.values()} == {None}
    assert found.measured["speedup"] >= 1.05


@pytest.mark.filterwarnings("ignore:agentsd. this run has no early step")
def test_without_guidance_the_whole_output_counts(small):
    settings = COUNTED | {"guidance_scale": 1.0}
    found = calibrate(small, PROMPTS[:1], speedup=1.04, **settings)
    calls = stock_calls(small, PROMPTS[:1], 3, num_inference_steps=3, guidance_scale=1.0)
    assert len(calls[0][2]) == 1
    assert found.measured["error"] == pytest.approx(figures_of(small, calls, found, None)[0], rel=1e-3)
    pairs = calibrate(small, PROMPTS[:1], speedup=1.04, num_images_per_prompt=2, **settings)
    assert pairs.measured["speedup"] >= 1.04


@pytest.mark.parametrize("host", ["SDXL", "ControlNet"])
def test_conditions_beside_the_prompt_are_recorded(make_pipeline, tokenizer, host):
    if host == "SDXL":
        pipe = make_pipeline(sdxl_unet(), cls=StableDiffusionXLPipeline, **sdxl_parts(tokenizer))
        inputs = {}
    else:
        parts = {"cls": StableDiffusionControlNetPipeline, "controlnet": make_controlnet()}
        pipe, inputs = make_pipeline(**parts), {"image": PICTURE}
    settings = COUNTED | {"calls": 1, "operators": (MERGE,)}
    found = calibrate(pipe, PROMPTS[:1], speedup=1.001, **settings, **inputs)
    assert 0 < found.measured["error"] < 1e-3
    with apply_agentsd(pipe, recipe=found) as handle:
        assert set(handle.layer_names) == set(found.layers)


def test_time_is_the_cost_by_default(small, monkeypatch):
    """By a clock that shows 10 s for a U-Net call, and 10 ms for each query of its three layers."""
    shown = 0.0

    def pass_by(seconds):
        nonlocal shown
        shown += seconds

    monkeypatch.setattr(time, "process_time", lambda: shown)
    small.unet.conv_in.register_forward_hook(lambda *args: pass_by(10))
    for name, module in small.unet.named_modules():
        if name.endswith("attn1.to_q"):
            module.register_forward_hook(lambda m, args, out: pass_by(out.shape[1] / 100))
    settings = {"num_inference_steps": 2, "calls": 2, "operators": (MERGE, AGENTS)}
    found = calibrate(small, PROMPTS[:1], max_error=1.0, **settings)
    assert found.measured["cost"] == "time"
    # half of 256 queries a layer are merged away; agents, which are queries too, come on top of them all
    assert list(found.layers.values()) == [MERGE] * 3
    assert found.measured["speedup"] == pytest.approx((10 + 3 * 2.56) / (10 + 3 * 1.28))
