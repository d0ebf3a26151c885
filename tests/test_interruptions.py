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
from callers import Caller, Guided, equal, outputs, plant, whole
from recipes import STEP_CACHING
from tiny import kept, make_small_unet, make_unet, snapshot

import agentsd
from agentsd import Agents, Recipe, StepCache, apply_agentsd, remove_agentsd
from agentsd.recipe import AGENTSD, FAST

PACKAGE = Path(agentsd.__file__).parent


def interrupted(unet, caller, where, error, i):
    plant(unet, where, error)
    with pytest.raises(error):
        caller(unet, i)


def test_an_error_in_a_call_leaves_nothing():
    """torch runs hooks after it."""
    for at, where in ((6, "down_blocks.0.attentions.0.transformer_blocks.0.attn1"), (7, "conv_out")):
        caller, unet = Caller(12), make_small_unet()
        handle = apply_agentsd(unet, recipe=Recipe(Agents(), steps=StepCache(2)))
        outputs(unet, caller, calls=range(at))
        interrupted(unet, caller, where, RuntimeError, at)
        assert not kept(handle)
        assert whole(unet)
        assert all(layer.block_input is None for layer in handle._layers.processors)


@pytest.mark.parametrize(("start", "convert"), [("reset", int), ("set_timesteps", lambda t: t)])
def test_a_run_that_was_broken_off_leaves_nothing_to_the_next(start, convert):
    """Where the caller says so, another image on the same list is a run of its own."""
    made = []
    for used in (True, False):
        before, caller = Guided(20, seed=1), Guided(20)
        handle = apply_agentsd(caller.pipe(unet := make_unet()), recipe=STEP_CACHING)
        before.timesteps = [convert(t) for t in caller.scheduler.timesteps]
        outputs(unet, before, calls=range(9 if used else 0))
        if start == "reset":
            handle.reset()
        else:
            caller.scheduler.set_timesteps(20)
        caller.timesteps = [convert(t) for t in caller.scheduler.timesteps]
        outs = outputs(unet, caller, calls=range(9, 20))
        made.append((outs, handle.last_run, handle.summary()))
    assert equal(made[0][0], made[1][0])
    assert made[0][1:] == made[1][1:]
    assert len(made[0][1]) == 11


def test_an_interrupted_call_leaves_nothing_to_the_rest_of_its_run():
    """Nobody says that it died; the caller makes it again. The oracle is a fresh handle."""
    made = []
    for used in (True, False):
        caller = Guided(20)
        apply_agentsd(caller.pipe(unet := make_small_unet()), recipe=STEP_CACHING)
        if used:
            outputs(unet, caller, calls=range(10))
            interrupted(unet, caller, "up_blocks.1", KeyboardInterrupt, 10)
        made.append(outputs(unet, caller, calls=range(10, 20)))
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
OFF = {
    "enabled": lambda unet, handle: setattr(handle, "enabled", False),
    "remove": lambda unet, handle: handle.remove(),
    "with": lambda unet, handle: handle.__exit__(None, None, None),
    "another": lambda unet, handle: apply_agentsd(unet, recipe=AGENTSD).remove(),
}
AFTER = ("reset", "next", *OFF)
"""What comes after the interruption, and leaves the model as it was or runs as if nothing had been."""


@pytest.mark.parametrize(
    "time",
    ["first", pytest.param("middle", marks=pytest.mark.slow), pytest.param("last", marks=pytest.mark.slow)],
)
def test_an_interruption_between_any_two_lines_is_undone(time):
    """Oracles: the model that was never patched, and a fresh handle."""
    caller = Caller(9, size=(8, 8))
    stock = [caller(unet := make_small_unet(), i) for i in range(6)]
    apply_agentsd(caller.pipe(unet), recipe=BOTH)
    expected = [caller(unet, i) for i in range(6)]
    # By `partial`, as below: the hook walks the stack, so each frame more is another line.
    lines = traced(partial(patched_calls, make_small_unet(), caller, []))
    assert len(lines) > 300
    for number, (line, count) in enumerate(sorted(lines.items())):
        clean, made = snapshot(unet := make_small_unet()), []
        at = line, {"first": 1, "middle": (count + 1) // 2, "last": count}[time]
        with pytest.raises(KeyboardInterrupt):
            traced(partial(patched_calls, unet, caller, made), at)
        after = AFTER[number % len(AFTER)] if made else ""
        if after == "next":  # half unpatched, it may run as either
            again = [caller(unet, i) for i in range(6)]
            assert equal(again, expected) or equal(again, stock), at
        elif after == "reset":
            made[0].reset()
            assert whole(unet), at
        elif after:
            OFF[after](unet, made[0])
            assert torch.equal(caller(unet, 4), stock[4]), at
        remove_agentsd(unet)
        assert snapshot(unet) == clean, at
        assert torch.equal(caller(unet, 4), stock[4]), at
