"""What an interruption, an error or a switch in the middle of a run leaves behind.

Oracles: a U-Net that was never patched, and a fresh handle.
"""

import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from callers import RUN, Caller, Guided, ddim, equal, inputs, outputs
from recipes import AGENTS_THEN_KEYS, STEP_CACHING
from tiny import fingerprint, kept, make_small_unet, make_unet, may_skip, snapshot

import agentsd
from agentsd import Recipe, ResidualSharing, StepCache, apply_agentsd, remove_agentsd
from agentsd.attention import Downsample
from agentsd.recipe import AGENTSD, FAST

PACKAGE = Path(agentsd.__file__).parent
CACHED = Recipe(steps=StepCache(2))
RECIPES = {
    "paper": AGENTSD,
    "step-caching": STEP_CACHING,
    "residuals": Recipe(Downsample(), residual=ResidualSharing(2, warmup_steps=1)),
}
OFF = {
    "enabled": lambda unet, handle: setattr(handle, "enabled", False),
    "remove": lambda unet, handle: handle.remove(),
    "remove_agentsd": lambda unet, handle: remove_agentsd(unet),
    "with": lambda unet, handle: handle.__exit__(None, None, None),
}


def whole(unet):
    """No block of the model is replaced."""
    return not any("forward" in vars(module) for module in unet.modules())


def plant(unet, where, error):
    """Raise an error in the next call, at a place in the model."""

    def interrupt(*_):
        hook.remove()
        raise error

    hook = unet.get_submodule(where).register_forward_pre_hook(interrupt)


@pytest.mark.parametrize(
    ("name", "off", "error"),
    [
        *(("step-caching", off, KeyboardInterrupt) for off in OFF),
        ("paper", "remove", KeyboardInterrupt),
        ("residuals", "enabled", RuntimeError),
    ],
)
def test_off_is_off_after_an_interruption(name, off, error):
    clean, caller = snapshot(before := make_small_unet()), Caller(12)
    expected = outputs(before, caller)
    for at, where in ((6, "up_blocks.1"), (7, "conv_out")):
        handle, other = apply_agentsd(unet := make_small_unet(), recipe=RECIPES[name]), Caller(12)
        for i in range(at):
            other(unet, i)
        plant(unet, where, error)
        with pytest.raises(error):
            other(unet, at)
        OFF[off](unet, handle)
        assert equal(outputs(unet, caller), expected)
        if off != "enabled":
            assert snapshot(unet).keys() == clean.keys()
            assert whole(unet)


@pytest.mark.parametrize(
    ("recipe", "place", "error", "at"),
    [
        (CACHED, "up_blocks.0", KeyboardInterrupt, 3),
        (CACHED, "conv_out", ZeroDivisionError, 2),
        (AGENTS_THEN_KEYS, "mid_block", ZeroDivisionError, 2),
    ],
)
def test_an_exception_in_a_call_leaves_the_next_run_clean(make_pipeline, sample, recipe, place, error, at):
    """Nobody says that the run is over."""
    pipe = make_pipeline(scheduler=ddim())
    handle = apply_agentsd(pipe, recipe=recipe)
    before, image, calls = snapshot(pipe.unet), sample(pipe, **RUN), []

    def fail(module, args, output):
        calls.append(None)
        if len(calls) == at:
            raise error

    hook = pipe.unet.get_submodule(place).register_forward_hook(may_skip(fail))
    with pytest.raises(error):
        sample(pipe, **RUN)
    hook.remove()
    if error is ZeroDivisionError:
        assert snapshot(pipe.unet) == before
        assert not kept(handle)
        assert all(layer.block_input is None for layer in handle._layers.processors)
    assert torch.equal(sample(pipe, **RUN), image)
    handle.remove()
    assert whole(pipe.unet)


def test_another_recipe_can_be_applied_after_an_interruption():
    apply_agentsd(unet := make_small_unet(), recipe=AGENTS_THEN_KEYS)
    plant(unet, "up_blocks.1", KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        Caller(12)(unet, 0)
    apply_agentsd(unet, recipe=AGENTSD)
    apply_agentsd(other := make_small_unet(), recipe=AGENTSD)
    assert equal(outputs(unet, Caller(12)), outputs(other, Caller(12)))


def test_off_is_off_after_a_call_with_gradients():
    """In other sizes of the batch, too."""
    unet, stock = make_unet(), make_unet()
    handle = apply_agentsd(unet, recipe=AGENTSD)
    latent, text = inputs()
    unet(latent, torch.tensor(900), text).sample.square().mean().backward()
    handle.enabled = False
    for batch in (2, 4, 1):
        latent, text = inputs(batch=batch)
        with torch.no_grad():
            made, expected = (one(latent, torch.tensor(500), text).sample for one in (unet, stock))
        assert torch.equal(made, expected)


@pytest.mark.parametrize(("start", "convert"), [("reset", int), ("set_timesteps", lambda t: t)])
def test_a_run_that_was_broken_off_leaves_nothing_to_the_next(start, convert):
    """Where the caller says so, another image on the same list is a run of its own."""
    made = []
    for used in (True, False):
        before, caller = Guided(20, seed=1), Guided(20)
        scheduler = caller.scheduler
        handle = apply_agentsd(caller.pipe(unet := make_unet()), recipe=STEP_CACHING)
        before.timesteps = [convert(t) for t in scheduler.timesteps]
        for i in range(9 if used else 0):
            before(unet, i)
        if start == "reset":
            handle.reset()
        else:
            scheduler.set_timesteps(20)
        caller.timesteps = [convert(t) for t in scheduler.timesteps]
        made.append(([caller(unet, i) for i in range(9, 20)], handle.last_run, handle.summary()))
    assert equal(made[0][0], made[1][0])
    assert made[0][1:] == made[1][1:]
    assert len(made[0][1]) == 11


def test_an_interrupted_call_leaves_nothing_to_the_rest_of_its_run():
    """Nobody says that it died; the caller makes it again. The oracle is a fresh handle."""
    made = []
    for used in (True, False):
        caller = Guided(20)
        apply_agentsd(caller.pipe(unet := make_small_unet()), recipe=STEP_CACHING)
        for i in range(10 if used else 0):
            caller(unet, i)
        if used:
            plant(unet, "up_blocks.1", KeyboardInterrupt)
            with pytest.raises(KeyboardInterrupt):
                caller(unet, 10)
        made.append([caller(unet, i) for i in range(10, 20)])
    assert equal(*made)


NAMES = ("apply", "hook", "hosts", "layers", "memory", "planning", "run", "skip", "turn")
FILES = {str(PACKAGE / f"{name}.py") for name in NAMES}
"""The code that puts stubs, processors and hooks in and out, and knows where in its run a call is."""


def traced(work, at=None):
    """Run something, interrupted at a line that begins for the n-th time; returns how often each began."""
    begun = Counter()

    def local(frame, event, arg):
        if event == "line":
            line = frame.f_code.co_filename, frame.f_lineno
            begun[line] += 1
            if at is not None and line == at[0] and begun[line] == at[1]:
                sys.settrace(None)
                raise KeyboardInterrupt
        return local

    sys.settrace(lambda frame, event, arg: local if frame.f_code.co_filename in FILES else None)
    try:
        work()
    finally:
        sys.settrace(None)
    return begun


def patched_calls(unet, caller, made):
    """Patch a U-Net, call it in the first steps of a run, two of them cached, and unpatch it."""
    made.append(apply_agentsd(caller.pipe(unet), recipe=BOTH))
    for i in range(6):
        caller(unet, i)
    made[0].remove()


BOTH = replace(FAST, residual=replace(FAST.residual, least_tokens=0))
AFTER = ("remove", "reset", "next")
"""What comes after the interruption, and leaves the model as it was or runs as if nothing had been."""


@pytest.mark.parametrize(
    "time",
    ["first", pytest.param("middle", marks=pytest.mark.slow), pytest.param("last", marks=pytest.mark.slow)],
)
def test_an_interruption_between_any_two_lines_is_undone(time):
    """Oracles: the model that was never patched, and a fresh handle."""
    caller = Caller(9, size=(8, 8))
    clean, stock = fingerprint(unet := make_small_unet()), [caller(unet, i) for i in range(6)]
    apply_agentsd(caller.pipe(unet), recipe=BOTH)
    expected = [caller(unet, i) for i in range(6)]
    # By `partial`, as below: the hook walks the stack, so each frame more is another line.
    lines = traced(partial(patched_calls, make_small_unet(), caller, []))
    assert len(lines) > 300
    for number, (line, count) in enumerate(sorted(lines.items())):
        unet, made = make_small_unet(), []
        at = line, {"first": 1, "middle": (count + 1) // 2, "last": count}[time]
        with pytest.raises(KeyboardInterrupt):
            traced(partial(patched_calls, unet, caller, made), at)
        after = AFTER[number % 3] if made else "remove"
        if after == "next":  # half unpatched, it may run as either
            again = [caller(unet, i) for i in range(6)]
            assert equal(again, expected) or equal(again, stock), at
        elif after == "reset":
            made[0].reset()
            assert whole(unet), at
        remove_agentsd(unet)
        assert fingerprint(unet) == clean, at
        assert torch.equal(caller(unet, 4), stock[4]), at
