"""Calibration against single runs under a patch, made here, and against all combinations of small cases."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import random
import shutil
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    EulerDiscreteScheduler,
    LCMScheduler,
    StableDiffusionControlNetPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionXLPipeline,
)
from tiny import BETAS, PICTURE, make_controlnet, make_unet, sdxl_parts, sdxl_unet, snapshot

from agentsd import Agents, Merge, Phases, Recipe, ReuseGuidance, ReuseSteps, apply_agentsd, calibrate
from agentsd.calibration import measured, search
from agentsd.calibration.attention import (
    OPERATORS,
    Effect,
    choices_of,
    cost_of_layers,
    layers_of,
    try_operator,
)
from agentsd.calibration.cost import multiply_adds
from agentsd.calibration.fewer import at_cost, chosen_levels, promises
from agentsd.calibration.losses import Losses
from agentsd.calibration.measured import between
from agentsd.calibration.program import Plan
from agentsd.calibration.recording import Call, cheap_call, record
from agentsd.calibration.runs import Figures
from agentsd.calibration.search import Found, _of_distance, _of_speedup
from agentsd.hosts import EVERY_LEVEL, find_sites
from agentsd.modules import FocusedLinear
from agentsd.reuse.left_out import LeftOut
from agentsd.reuse.states import sigma

STEPS = 8
SETTINGS = {"num_inference_steps": STEPS, "guidance_scale": 7.5}
MERGE = Merge(0.5, ranking="layer")
COUNTED = {
    "cost": "multiply_adds",
    "operators": (MERGE,),
    "held_out": ["a dog"],
    "converged_steps": 20,
} | SETTINGS


@pytest.fixture(scope="module")
def make_plain(make_pipeline):
    """Makes a pipeline of three self-attention layers, with one U-Net call in each step."""

    def make(**parts):
        unet = make_unet(
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "UpBlock2D", "CrossAttnUpBlock2D"),
            mid_block_type=None,
        )
        scheduler = DDIMScheduler(**BETAS, clip_sample=False, steps_offset=1)
        return make_pipeline(**{"unet": unet, "scheduler": scheduler} | parts)

    return make


@pytest.fixture
def plain(make_plain):
    return make_plain()


@pytest.fixture(scope="module")
def calibrated(make_plain, tmp_path_factory):
    """The file of a calibration, its recipe, and what it told of progress."""
    path, told = tmp_path_factory.mktemp("calibrated") / "figures.jsonl", []
    found = calibrate(
        make_plain(),
        ["a cat"],
        speedup=1.6,
        resume=path,
        on_step=lambda *step: told.append(step),
        **COUNTED,
    )
    return path, found, told


@pytest.fixture
def figures(calibrated, tmp_path):
    """A copy of that file."""
    return shutil.copy(calibrated[0], tmp_path / "figures.jsonl")


def run(pipe, prompt="a cat", seed=0, **changes):
    """The final latents and what the U-Net gave in each call."""
    outputs = []
    hook = pipe.unet.register_forward_hook(lambda m, args, out: outputs.append(out[0].clone()))
    rng = torch.Generator().manual_seed(seed)
    latents = pipe(prompt, generator=rng, output_type="latent", **SETTINGS | changes).images
    hook.remove()
    return latents, outputs


def distance(one, other):
    """Root mean square of the change, over the other's."""
    return float((one - other).double().norm() / other.double().norm())


def work(pipe, **changes):
    """Multiply-adds of the U-Net's calls in a run."""
    counts, host = [], pipe.unet.forward

    def counted(*args, **kwargs):
        outputs = []
        counts.append(multiply_adds(lambda: outputs.append(host(*args, **kwargs))))
        return outputs[0]

    pipe.unet.forward = counted
    run(pipe, **changes)
    del pipe.unet.forward
    return sum(counts)


def recorded(pipe):
    """A stock run's calls, and what its calls leave out."""
    left_out = LeftOut(pipe.unet, 1)
    tap = left_out.hook()
    calls, _ = record(pipe, pipe.unet, left_out, 0.4, lambda: run(pipe)[0])
    return calls, left_out, tap


def measured_losses(pipe, scale):
    """The recorded calls, their losses, and what measures more."""
    calls, left_out, tap = recorded(pipe)
    losses = Losses(scale, 3, 5)
    for place in range(len(calls)):
        losses.add(losses.measure(calls, place, pipe.unet, left_out))
    return calls, losses, left_out, tap


def guided(output, scale=7.5):
    without, with_prompt = output.double().chunk(2)
    return without + scale * (with_prompt - without)


def test_losses_are_those_of_a_run_with_one_such_call(plain):
    """The last step is the only one left out, so that all before it is stock's."""
    before = snapshot(plain.unet)
    calls, losses, _, tap = measured_losses(plain, 7.5)
    tap.remove()
    assert snapshot(plain.unet) == before
    assert [call.early for call in calls] == [True] * 3 + [False] * 5
    stock = guided(run(plain)[1][-1])
    levels = tuple(call.level for call in calls)
    assert len(levels) == STEPS
    last = STEPS - 1
    for order in (0, 1):
        with apply_agentsd(plain, recipe=Recipe(steps=ReuseSteps(order=order, at=levels[:-1]))) as handle:
            cheap = guided(run(plain)[1][-1])
            assert handle.summary().split()[0] == "F" * last + "f"
        fulls = tuple(range(last))[-1 - order :]
        expected = float((cheap - stock).square().mean())
        assert expected > 0
        assert losses.of(last, "f", fulls, last - 1) == pytest.approx(expected, rel=1e-3)
    with apply_agentsd(plain, recipe=Recipe(guidance=ReuseGuidance(at=levels[:-1]))) as handle:
        half = guided(run(plain)[1][-1])
        assert handle.summary().split()[0] == "F" * last + "H"
    expected = float((half - stock).square().mean())
    assert losses.of(last, "H", (last - 1,), last - 1) == pytest.approx(expected, rel=1e-3)
    assert losses.of(last, "F", (), -1) == 0.0


def test_a_state_of_the_step_itself_loses_nothing_and_a_line_of_states_is_met(plain):
    calls, left_out, tap = recorded(plain)
    losses = Losses(7.5, 3, 5)
    for call in calls:
        assert losses.change(call, [call], plain.unet, left_out).abs().max() < 1e-6
    base, slope = calls[0].hidden, torch.randn_like(calls[0].hidden) / 1000
    lined = [
        Call(c.step, c.level, c.given, c.output, base + sigma(c.level) * slope, c.early)
        for c in (calls[1], calls[3], calls[4])
    ]
    exact = cheap_call(plain.unet, left_out, lined[2].given, lined[2].hidden) - calls[4].sample
    first = losses.change(lined[2], lined[:2], plain.unet, left_out)
    kept = losses.change(lined[2], lined[1:2], plain.unet, left_out)
    assert torch.allclose(first, exact, atol=1e-5)
    assert (kept - exact).abs().max() > 1e-4
    tap.remove()


def test_an_operators_loss_and_saving_are_those_of_a_patched_call(plain):
    calls, _, tap = recorded(plain)
    tap.remove()
    site, losses = find_sites(plain.unet, EVERY_LEVEL, at_most=True)[1], Losses(7.5, 3, 5)
    call, unet = calls[5], plain.unet
    loss, spent = try_operator(unet, site, MERGE, call, losses, "multiply_adds")
    stock = cost_of_layers(unet, find_sites(unet, EVERY_LEVEL, at_most=True), call, "multiply_adds")
    saved = stock[site.name] - spent
    with torch.no_grad():
        before = multiply_adds(lambda: unet(**call.given))
        with apply_agentsd(unet, recipe=Recipe(layers={site.name: MERGE})):
            after = multiply_adds(lambda: unet(**call.given))
            changed = guided(unet(**call.given)[0])
    assert loss == pytest.approx(float((changed - guided(call.sample)).square().mean()), rel=1e-3)
    assert loss > 0
    assert saved == before - after > 0


def test_no_combination_of_layers_saves_as_much_for_less():
    rng = random.Random(0)
    for _ in range(20):
        effects = {
            f"layer {i}": {o: Effect(rng.random(), rng.uniform(-0.05, 0.2)) for o in OPERATORS}
            for i in range(4)
        }
        every = [
            [
                of[operator] if operator else Effect(0.0, 0.0)
                for of, operator in zip(effects.values(), does, strict=True)
            ]
            for does in itertools.product((None, *OPERATORS), repeat=4)
        ]
        sums = [(sum(e.loss for e in one), sum(e.saved for e in one)) for one in every]
        found = choices_of(effects, lambda name: name == "layer 0", 99)
        assert found[0].does == {}
        assert found[-1].full == pytest.approx(max(saved for _, saved in sums))
        for choice in found:
            own = {name: effects[name][operator] for name, operator in choice.does.items()}
            assert choice.loss == pytest.approx(sum(effect.loss for effect in own.values()))
            assert choice.full == pytest.approx(sum(effect.saved for effect in own.values()))
            assert choice.cheap == pytest.approx(own.get("layer 0", Effect(0.0, 0.0)).saved)
            least = min(loss for loss, saved in sums if saved >= choice.full - 1e-9)
            assert choice.loss == pytest.approx(least)
        few = choices_of(effects, lambda name: False, 3)
        assert len(few) <= 3
        assert (few[0].full, few[-1].full) == (0.0, pytest.approx(found[-1].full))


def test_layers_are_written_by_phase():
    early, late = ({"a": MERGE, "b": MERGE}, {"b": MERGE, "c": Agents()})
    effects = [{name: {o: Effect(1.0, 0.1)} for name, o in of.items()} for of in (early, late)]
    chosen = [choices_of(of, lambda name: False, 9)[-1] for of in effects]
    found = layers_of(dict(zip((True, False), chosen, strict=True)), 0.3)
    assert found == {"a": Phases(MERGE, None, 0.3), "b": MERGE, "c": Phases(None, Agents(), 0.3)}


def test_the_goal_is_met_as_measured_by_patching(plain, calibrated, tmp_path):
    _, found, told = calibrated
    stock = run(plain)[0]
    unpatched = work(plain)
    with apply_agentsd(plain, recipe=found) as handle:
        patched = run(plain)[0]
        calls = handle.summary().split()[0]
        speedup = unpatched / work(plain)
    figures = found.measured["found"]
    assert figures["speedup"] == pytest.approx(speedup)
    assert speedup >= 1.6
    assert figures["predicted_speedup"] == pytest.approx(speedup, rel=0.02)
    assert figures["distance"] == pytest.approx(distance(patched, stock), rel=1e-3)
    assert found.measured["plan"] == calls
    assert found.measured["goal"] == {"speedup": 1.6}
    assert [done for done, _ in told[:-1]] == list(range(1, len(told)))
    assert told[-1] == (len(told) - 1, len(told) - 1)
    again = Recipe.load(found.save(tmp_path / "mine.yaml"))
    assert (again, again.measured) == (found, found.measured)


def test_promises_are_those_of_held_out_prompts(plain, calibrated):
    found = calibrated[1]
    promised = found.measured["promises"]
    stock = run(plain, "a dog", 1)[0]
    converged = run(plain, "a dog", 1, num_inference_steps=20)[0]
    with apply_agentsd(plain, recipe=found):
        patched = run(plain, "a dog", 1)[0]
    assert promised["distance"] == pytest.approx(distance(patched, stock), rel=1e-3)
    assert promised["converged"] == pytest.approx(distance(patched, converged), rel=1e-3)
    assert promised["stock_converged"] == pytest.approx(distance(stock, converged), rel=1e-3)
    assert (promised["prompts"], promised["held_out"]) == (1, True)
    for row in promised["fewer_steps"]:
        fewer = run(plain, "a dog", 1, num_inference_steps=row["steps"])[0]
        assert row["timesteps"] == plain.scheduler.timesteps.tolist()
        assert row["distance"] == pytest.approx(distance(fewer, stock), rel=1e-3)
        assert row["converged"] == pytest.approx(distance(fewer, converged), rel=1e-3)
        assert row["speedup"] == pytest.approx(STEPS / row["steps"])
    made_on = found.measured["made_on"]
    assert {name: made_on[name] for name in ("steps", "sampler", "size", "prompts", "cost", "seed")} == {
        "steps": STEPS, "sampler": "DDIMScheduler", "size": [32, 32], "prompts": ["a cat"],
        "cost": "multiply_adds", "seed": 0,
    }  # fmt: skip
    assert set(made_on["versions"]) == {"agentsd", "torch", "diffusers"}


def test_another_goal_takes_the_same_figures(plain, figures):
    before, runs = snapshot(plain.unet), []
    plain.scheduler.register_to_config(_use_default_values=["beta_end"])  # in each process in another order
    hook = plain.unet.conv_in.register_forward_hook(lambda *args: runs.append(1))
    found = calibrate(plain, ["a cat"], max_distance=0.02, resume=figures, **COUNTED)
    hook.remove()
    assert snapshot(plain.unet) == before
    with apply_agentsd(plain, recipe=found):
        patched = run(plain)[0]
    assert found.measured["found"]["distance"] == pytest.approx(distance(patched, run(plain)[0]), rel=1e-3)
    assert found.measured["found"]["distance"] <= 0.02
    assert found.measured["found"]["speedup"] > 1.6
    assert len(runs) < 20 * STEPS  # no table is measured again


def test_layers_of_little_cost_stay_stock(plain, figures, monkeypatch):
    monkeypatch.setattr(measured, "SMALL", 1.0)
    assert calibrate(plain, ["a cat"], speedup=1.3, resume=figures, **COUNTED).layers is None


@pytest.mark.parametrize("place", [1, 30])
def test_what_was_stopped_goes_on(plain, calibrated, tmp_path, place):
    """Before the table, and in the runs under a plan."""
    path, found, told = calibrated
    lines, before = path.read_text().splitlines(True), snapshot(plain.unet)
    part = tmp_path / "part.jsonl"
    part.write_text("".join(lines[: place + 1]) + lines[place + 1][:30])  # killed as it wrote a line

    def stop(done, total):
        if len(part.read_text().splitlines()) > place + 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(plain, ["a cat"], speedup=1.6, resume=part, on_step=stop, **COUNTED)
    assert snapshot(plain.unet) == before
    ticks = []
    again = calibrate(
        plain, ["a cat"], speedup=1.6, resume=part, on_step=lambda *step: ticks.append(step), **COUNTED
    )
    assert (again, again.measured) == (found, found.measured)
    assert (len(ticks), ticks[-1]) == (len(told), told[-1])
    assert sorted(part.read_text().splitlines()) == sorted(path.read_text().splitlines())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "was begun with seed=0, here it is 1"),
        ({"prompts": ["a car"]}, r"was begun with prompts=\['a cat'\], here it is \['a car'\]"),
        ({"height": 64}, "was begun with call.height=None, here it is 64"),
        ({"noisier": True}, "was begun with sampler_settings.beta_end=0.012, here it is 0.013"),
        ({"operators": ()}, r'was begun with operators=\["Merge'),
        ({"model": True}, "was begun with weights="),
    ],
)
def test_figures_of_something_else_are_refused(plain, figures, monkeypatch, changes, message):
    monkeypatch.setattr(type(plain), "__call__", lambda *args, **kwargs: pytest.fail("it was run"))
    if changes.pop("noisier", False):
        plain.scheduler.register_to_config(beta_end=0.013)
    if changes.pop("model", False):
        torch.nn.init.zeros_(plain.unet.conv_in.bias)
    with pytest.raises(ValueError, match=message + ".*: pass another file, or remove this one"):
        calibrate(plain, **{"prompts": ["a cat"], "speedup": 1.5, "resume": figures, **COUNTED} | changes)


@pytest.mark.parametrize("content", ["steps: 3\n", "[1]\n", "none", json.dumps({"of": 3}) + "\n{}\n"])
def test_a_file_of_another_kind_is_left_as_it_is(plain, tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"notes.txt' (is no calibration's|was begun with).*: pass another"):
        calibrate(plain, ["a cat"], speedup=1.5, resume=path)
    assert path.read_text() == content
    with pytest.raises(ValueError, match="Is a directory; pass a file's path"):
        calibrate(plain, ["a cat"], speedup=1.5, resume=tmp_path)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"speedup": None}, ValueError, "speedup=None, max_distance=None: give one goal"),
        ({"max_distance": 0.1}, ValueError, "speedup=1.5, max_distance=0.1: give one goal"),
        ({"speedup": 1.0}, ValueError, r"speedup=1\.0: pass more than 1"),
        ({"speedup": float("nan")}, ValueError, "speedup=nan: pass more than 1"),
        ({"speedup": None, "max_distance": -1}, ValueError, "max_distance=-1: pass more than 0"),
        ({"prompts": "a cat"}, ValueError, "prompts='a cat': pass a list"),
        ({"prompts": []}, ValueError, r"prompts=\[\]: pass a list"),
        ({"held_out": "a dog"}, ValueError, "held_out='a dog': pass a list"),
        ({"held_out": ["a cat"]}, ValueError, r"held_out=\['a cat'\]: they are among the prompts"),
        ({"cost": "flops"}, ValueError, "cost='flops': choose 'time' or 'multiply_adds'"),
        ({"operators": [FocusedLinear()]}, ValueError, r"FocusedLinear\(.*: it is to be trained"),
        ({"operators": [Merge]}, ValueError, "pass operators, as"),
        ({"converged_steps": 9}, ValueError, "converged_steps=9: pass more than num_inference_steps=25"),
        ({"early_frac": 2}, ValueError, "early_frac=2: pass a share"),
        ({"num_inference_steps": 5}, ValueError, "nothing can be left out .* a run of 5 steps has none"),
        ({"timesteps": [1, 2]}, ValueError, r"timesteps=\[1, 2\]: leave it out"),
        ({"output_type": "pil"}, ValueError, "output_type='pil': leave it out"),
    ],
)
def test_wrong_arguments_are_named_before_any_run(plain, monkeypatch, changes, error, message):
    monkeypatch.setattr(type(plain), "__call__", lambda *args, **kwargs: pytest.fail("it was run"))
    before = snapshot(plain.unet)
    with pytest.raises(error, match=message):
        calibrate(plain, **{"prompts": ["a cat"], "speedup": 1.5} | changes)
    assert snapshot(plain.unet) == before


def test_what_cannot_be_calibrated_is_refused_before_any_run(plain, make_plain, monkeypatch):
    monkeypatch.setattr(type(plain), "__call__", lambda *args, **kwargs: pytest.fail("it was run"))
    with pytest.raises(TypeError, match="is no pipeline with a `unet`"):
        calibrate(plain.unet, ["a cat"], speedup=1.5)
    with apply_agentsd(plain), pytest.raises(ValueError, match=r"call remove_agentsd\(pipe\) first"):
        calibrate(plain, ["a cat"], speedup=1.5)
    few = make_plain(scheduler=LCMScheduler(**BETAS, steps_offset=1))
    with pytest.raises(ValueError, match=r"nothing can be left out .* LCMScheduler is for few steps"):
        calibrate(few, ["a cat"], speedup=1.5)
    attn = plain.unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1
    plain_processor = attn.processor
    attn.set_processor(type("Strange", (), {"__call__": lambda *args: None})())
    with pytest.raises(ValueError, match=r"down_blocks.* has a Strange"):
        calibrate(plain, ["a cat"], speedup=1.1)
    with pytest.raises(ValueError, match=r"down_blocks.* has a Strange, which may have to see each call"):
        calibrate(plain, ["a cat"], speedup=1.1, operators=())
    attn.set_processor(plain_processor)
    compiled = copy.copy(plain)
    compiled.unet = make_unet()
    compiled.unet.compile()
    with pytest.raises(ValueError, match="calibrate first, and compile it afterwards"):
        calibrate(compiled, ["a cat"], speedup=1.5)


def test_a_goal_out_of_reach_is_told_after_one_run(plain):
    before, runs = snapshot(plain.unet), []
    kind = type(plain).__call__

    class Counted(type(plain)):
        def __call__(self, *args, **kwargs):
            runs.append(1)
            return kind(self, *args, **kwargs)

    plain.__class__ = Counted
    with pytest.raises(ValueError, match=r"speedup=99 cannot be met .*: the greatest is about \d+\.\d\d"):
        calibrate(plain, ["a cat", "a dog"], speedup=99, **SETTINGS)
    assert len(runs) == 1
    assert snapshot(plain.unet) == before


def test_what_is_found_for_a_speedup_meets_it_however_the_figures_lie():
    rng, seen = random.Random(2), []

    class Known:
        def compare(self, recipe, numbers):
            return figures[recipe]

    for _ in range(200):
        recipes = [Recipe(MERGE, seed=seed) for seed in range(rng.randrange(1, 20))]
        figures = {r: Figures(rng.uniform(1.2, 2), rng.random(), None, "Ff", []) for r in recipes}
        plans = [
            Found(Plan(100 - 3 * i, 0.1 * i, "Ff", ()), recipe, 0.1 * i) for i, recipe in enumerate(recipes)
        ]
        with suppress(ValueError):
            found = _of_speedup([plans[::2] or plans, plans[1::2] or plans], 100, 1.5, Known(), range(2))
            assert figures[found.recipe].speedup >= 1.5
            seen.append(found)
    assert len(seen) > 50
    figures = dict.fromkeys(recipes, Figures(1.4, 0.7, None, "Ff", []))
    plans = [Found(Plan(60, 0.1, "Ff", ()), recipes[0], 0.1)]
    with pytest.raises(ValueError, match=r"speedup=1\.5 was predicted, .* had 1\.40 at most"):
        _of_speedup([plans], 100, 1.5, Known(), range(2))
    with pytest.raises(ValueError, match=r"speedup=3 cannot be met .*: the greatest is about 1\.67"):
        _of_speedup([plans], 100, 3, Known(), range(2))


def test_what_is_found_for_a_distance_meets_it_however_the_figures_lie():
    rng = random.Random(1)

    class Known:
        def compare(self, recipe, numbers):
            return figures[recipe]

    for _ in range(200):
        recipes = [Recipe(MERGE, seed=seed) for seed in range(rng.randrange(1, 20))]
        figures = {recipe: Figures(rng.uniform(1.1, 2), rng.random(), None, "Ff", []) for recipe in recipes}
        plans = [
            Found(Plan(100 - 3 * i, 0.1 * i, "Ff", ()), recipe, 0.1 * i) for i, recipe in enumerate(recipes)
        ]
        with suppress(ValueError):
            found = _of_distance([plans[::2], plans[1::2]], 0.5, Known(), range(2))
            assert figures[found.recipe].distance <= 0.5
    figures = dict.fromkeys(recipes, Figures(1.5, 0.7, None, "Ff", []))
    with pytest.raises(ValueError, match=r"max_distance=0\.5 cannot be met .*: the least seen is 0\.7"):
        _of_distance([plans], 0.5, Known(), range(2))


def test_a_short_img2img_run_has_no_call_to_spare(plain):
    pipe = StableDiffusionImg2ImgPipeline(**plain.components, requires_safety_checker=False)
    before, image = snapshot(pipe.unet), {"image": torch.zeros(1, 3, 32, 32), "strength": 0.5}
    with pytest.raises(ValueError, match="a run of 4 steps has no call to spare: 8 or more are needed"):
        calibrate(pipe, ["a cat"], speedup=1.1, **SETTINGS, **image)
    assert snapshot(pipe.unet) == before


def test_a_model_that_fails_leaves_the_pipeline_as_it_was(plain):
    before, (stock, _), calls = snapshot(plain.unet), run(plain), []

    def fail(*args):
        calls.append(1)
        if len(calls) == STEPS + 9:
            raise RuntimeError("out of memory")

    hook = plain.unet.conv_out.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        calibrate(plain, ["a cat"], speedup=1.5, **SETTINGS)
    hook.remove()
    assert snapshot(plain.unet) == before
    assert torch.equal(run(plain)[0], stock)


@pytest.mark.parametrize("steps", [12, 25, 50])
def test_a_plan_serves_another_number_of_steps(plain, calibrated, steps):
    """As many full steps, each the nearest to a noise level of the plan's."""
    found = calibrated[1]
    with apply_agentsd(plain, recipe=found) as handle:
        run(plain, num_inference_steps=steps)
        calls = handle.summary().split()[0]
    levels = plain.scheduler.timesteps.tolist()
    assert (len(calls), calls[0]) == (steps, "F")
    wanted = {0} | {min(range(steps), key=lambda i: abs(levels[i] - level)) for level in found.steps.at}
    assert {i for i, symbol in enumerate(calls) if symbol in "FH"} == wanted
    assert len(set(calls) & set("Ff")) == 2


def test_a_plan_serves_another_size(plain, calibrated):
    with apply_agentsd(plain, recipe=calibrated[1]) as handle:
        run(plain, height=48, width=40)
        assert handle.summary().split()[0] == calibrated[1].measured["plan"]


def test_a_plan_stays_whole_in_few_steps(plain, calibrated):
    with apply_agentsd(plain, recipe=calibrated[1]) as handle:
        with pytest.warns(UserWarning, match="a run of 6 steps has none to spare"):
            run(plain, num_inference_steps=6)
        assert set(handle.summary().split()[0]) == {"F"}


def test_steps_of_two_calls_and_no_guidance(make_plain, pipe, monkeypatch):
    """The default scheduler makes its second step twice, and both calls are what the step is."""
    monkeypatch.setattr(search, "FRONTIER", 4)
    plms = make_plain(scheduler=pipe.scheduler)
    settings = SETTINGS | {"operators": (), "guidance_scale": 1.0, "cost": "time"}
    prompts = ["a cat", "a dog", "a car"]
    found = calibrate(plms, prompts, max_distance=10.0, **settings)

    def three():
        runs = [run(plms, prompt, seed, guidance_scale=1.0)[0] for seed, prompt in enumerate(prompts)]
        return torch.cat(runs)

    with apply_agentsd(plms, recipe=found) as handle:
        patched = three()
        calls = handle.summary().split()[0]
    plan = found.measured["plan"]
    assert calls == plan[:2] + plan[1:]
    assert (found.guidance, found.layers) == (None, None)
    assert set(plan) == {"F", "f"}
    promised = found.measured["promises"]
    assert promised["distance"] == pytest.approx(distance(patched, three()), rel=1e-3)
    assert (promised["prompts"], promised["held_out"]) == (3, False)


@pytest.mark.parametrize("host", ["SDXL", "ControlNet"])
def test_conditions_beside_the_prompt_are_recorded(make_pipeline, tokenizer, monkeypatch, host):
    monkeypatch.setattr(search, "FRONTIER", 2)
    if host == "SDXL":
        pipe = make_pipeline(sdxl_unet(), cls=StableDiffusionXLPipeline, **sdxl_parts(tokenizer))
        inputs = {}
    else:
        parts = {"cls": StableDiffusionControlNetPipeline, "controlnet": make_controlnet()}
        pipe, inputs = make_pipeline(**parts), {"image": PICTURE}
    settings = {"operators": (MERGE,), "cost": "time", **SETTINGS}
    found = calibrate(pipe, ["a cat"], max_distance=10.0, **settings, **inputs)
    assert 0 < found.measured["found"]["distance"] < 10
    with apply_agentsd(pipe, recipe=found) as handle:
        assert set(handle.layer_names) == set(found.layers or {})


def test_time_may_be_the_cost(plain, monkeypatch):
    """By a clock that shows 2 s for the last layer of a pass, 14 s for a deep one, and a query's 10 ms."""
    shown = 0.0

    def pass_by(seconds):
        nonlocal shown
        shown += seconds

    monkeypatch.setattr(time, "process_time", lambda: shown)
    plain.unet.conv_out.register_forward_hook(lambda m, args, out: pass_by(2 * len(args[0])))
    plain.unet.down_blocks[1].resnets[0].register_forward_hook(
        lambda m, args, out: pass_by(14 * len(args[0]))
    )
    found = calibrate(plain, ["a cat"], speedup=2.0, cost="time", operators=(), **SETTINGS)
    plan = found.measured["plan"]
    seconds = sum({"F": 32, "f": 4, "H": 16, "h": 2}[symbol] for symbol in plan)
    assert found.measured["made_on"]["cost"] == "time"
    assert found.measured["found"]["speedup"] == pytest.approx(32 * STEPS / seconds)
    assert found.measured["found"]["predicted_speedup"] == pytest.approx(32 * STEPS / seconds, rel=0.01)


def test_weights_lie_on_lines_of_their_logarithms():
    weights = {2: 1.0, 4: 100.0}
    assert [between(weights, step) for step in range(6)] == pytest.approx([1, 1, 1, 10, 100, 100])
    assert between({}, 3) == 1.0


@pytest.mark.parametrize(("steps", "expected"), [(2, 0.2), (2.5, 0.1), (3, 0.05), (1.2, 0.2)])
def test_fewer_steps_are_judged_at_the_plans_cost(steps, expected):
    """Half way between 2 steps at 0.2 and 3 at 0.05 is 0.1."""
    rows = [{"steps": 2, "distance": 0.2}, {"steps": 3, "distance": 0.05}]
    assert at_cost(rows, steps, "distance") == pytest.approx(expected)
    assert at_cost(rows[:1], steps, "distance") == pytest.approx(0.2)


@pytest.mark.parametrize(("converged", "beaten"), [(None, True), (0.2, False), (0.5, True)])
def test_fewer_steps_are_judged_by_converged_runs_where_there_are_any(converged, beaten):
    """Fewer steps end at 0.1 from stock and 0.4 from converged runs, the plan at 0.3 from stock."""

    class Known:
        def compare(self, recipe, numbers, num_inference_steps=None):
            if recipe is not None:
                return Figures(2.5, 0.3, converged, "F", [])
            known = None if converged is None else 0.4
            return Figures(10 / num_inference_steps, 0.1, known, "", [999.0])

        def stock_converged(self):
            return 0.05

    class Pipe:
        def __call__(self, prompt):
            pass

    table = SimpleNamespace(levels=[999.0 - 100 * i for i in range(10)], skipped=lambda *args: 1.0)
    found = promises(Pipe(), Known(), table, Recipe(MERGE), range(3))
    assert found["beaten_by_fewer_steps"] is beaten
    assert [row["steps"] for row in found["fewer_steps"]] == [4]
    assert found.get("stock_converged") == (None if converged is None else 0.05)


def test_a_step_left_out_loses_what_the_line_of_predictions_misses(plain):
    calls, losses, _, tap = measured_losses(plain, 7.5)
    tap.remove()
    (first, last, call), outputs = (calls[i] for i in (2, 4, 5)), [guided(c.sample) for c in calls]
    assert losses.of(5, "s", (4,), -1) == pytest.approx(float((outputs[4] - outputs[5]).square().mean()))
    slope = (outputs[4] - outputs[2]) / (sigma(last.level) - sigma(first.level))
    line = outputs[4] + slope * (sigma(call.level) - sigma(last.level))
    assert losses.of(5, "s", (2, 4), -1) == pytest.approx(
        float((line - outputs[5]).square().mean()), rel=1e-4
    )


def test_noise_levels_are_chosen_where_the_sampler_takes_them(make_plain, monkeypatch):
    monkeypatch.setattr(search, "FRONTIER", 2)
    pipe = make_plain(scheduler=EulerDiscreteScheduler(**BETAS, steps_offset=1))
    settings = SETTINGS | {"operators": (), "guidance_scale": 1.0, "cost": "time"}
    found = calibrate(pipe, ["a cat"], max_distance=10.0, **settings)
    stock = run(pipe, guidance_scale=1.0)[0]
    levels = pipe.scheduler.timesteps.tolist()
    rows = found.measured["promises"]["fewer_steps"]
    chosen = [row for row in rows if row.get("chosen")]
    assert [row["steps"] for row in chosen] == [row["steps"] for row in rows if not row.get("chosen")]
    for row in chosen:
        assert set(row["timesteps"]) <= set(levels)
        assert len(row["timesteps"]) == row["steps"]
        by_hand = run(pipe, timesteps=row["timesteps"], guidance_scale=1.0)[0]
        assert row["distance"] == pytest.approx(distance(by_hand, stock), rel=1e-3)


def test_no_other_levels_lose_less():
    """Against all sets of levels of a table at random."""
    rng, count = random.Random(0), 7

    levels = [float(900 - 100 * step) for step in range(count)]
    table = SimpleNamespace(levels=levels, skipped=functools.cache(lambda step, fulls: rng.random()))
    for order in (0, 1):
        found = chosen_levels(table, order)
        for steps, levels in found.items():
            totals = {}
            for made in itertools.combinations(range(1, count), steps - 1):
                made = (0, *made)
                if max(b - a for a, b in itertools.pairwise((*made, count))) > 5:
                    continue
                totals[made] = sum(
                    table.skipped(i, tuple(j for j in made if j < i)[-1 - order :])
                    for i in range(count)
                    if i not in made
                )
            place = tuple(table.levels.index(level) for level in levels)
            assert totals[place] == pytest.approx(min(totals.values()))
