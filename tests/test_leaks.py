"""What a server's many calls leave behind: counted."""

import gc
import sys
import weakref
from functools import partial

import pytest
import torch
from callers import Guided, Host, ddim, inputs, outputs
from logs import logged
from recipes import AGENTS_THEN_KEYS, STEP_CACHING
from tiny import kept, make_small_unet, may_skip, snapshot

from agentsd import Downsample, Recipe, ResidualSharing, StepCache, apply_agentsd
from agentsd.recipe import AGENTSD

RESIDUALS = Recipe(Downsample(), residual=ResidualSharing(2, warmup_steps=1))
CACHED = Recipe(steps=StepCache(2))


def weight(handle):
    """How many objects a handle leads to, without the model, and the tensors' bytes among them."""
    seen, todo, size = set(), [handle._hook], 0
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(thing, torch.nn.Module | type) or callable(thing):
            continue
        seen.add(id(thing))
        size += thing.nbytes if isinstance(thing, torch.Tensor) else 0
        todo += gc.get_referents(thing)
    return len(seen), size


def instructions(work):
    """How many calls of functions something takes."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@torch.no_grad()
def enter(unet, handle, latent, t, text):
    """A call's beginning and its end, without the model's own work."""
    handle._hook.begin(unet, (latent, t, text), {})
    handle._hook.end(unet, (latent, t, text), (latent,))


SERVERS = {
    "a scheduler a request": lambda number, scheduler: scheduler.timesteps,
    "one timestep, for ever": lambda number, scheduler: [999] * 9,
    "off the list": lambda number, scheduler: [float(f"{number % 999}.{number % 7 + 1}5")] * 9,
}


@pytest.mark.parametrize(
    ("recipe", "server"), [*zip((STEP_CACHING, RESIDUALS, AGENTSD), SERVERS, strict=True)]
)
def test_nothing_grows_in_thousands_of_calls(recipe, server):
    """The model's own work is left out: it leaves nothing but what it hands to the layers."""
    host, figures = Host(make_small_unet()), []
    handle = apply_agentsd(host, recipe=recipe)
    with logged() as messages:
        for number in range(150):
            if number % 10 == 0 or server.startswith("a scheduler"):
                host.scheduler = ddim(9)
            latent, text = inputs(number % 5)
            for t in SERVERS[server](number, host.scheduler):
                enter(host.unet, handle, latent, t, text)
            if number in (60, 140):
                gc.collect()
                again = partial(enter, host.unet, handle, latent, t, text)
                again()
                figures.append((*weight(handle), instructions(again)))
    (objects, size, steps), (later, later_size, later_steps) = figures
    assert later <= objects + 40
    assert later_size <= size
    assert later_steps <= 1.05 * steps + 20
    assert len(messages) < 8


@pytest.mark.parametrize("recipe", [CACHED, AGENTS_THEN_KEYS])
def test_many_runs_leave_no_hook_and_no_tensor(recipe):
    unet, caller = make_small_unet(), Guided(steps=8, size=(8, 8))
    before, counts = snapshot(unet), []
    for _ in range(3):
        handle = apply_agentsd(unet, recipe=recipe)
        for calls in (5, 8, 8):  # the first breaks off
            outputs(unet, caller, calls=range(calls))
            assert not any(handle._layers.plans())
        handle.remove()
        assert snapshot(unet) == before
        gc.collect()
        counts.append(sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects()))
    assert counts[1] == counts[2]


def test_no_reference_cycle_holds_the_model():
    unet, caller = make_small_unet(), Guided()
    handle = apply_agentsd(unet, recipe=CACHED)
    outputs(unet, caller, calls=range(4))
    gone = weakref.ref(unet)
    gc.disable()
    try:
        del unet, handle
        assert gone() is None
    finally:
        gc.enable()


def test_states_are_let_go_when_a_run_ends_or_breaks_off(make_pipeline, sample):
    pipe = make_pipeline(scheduler=ddim())
    handle = apply_agentsd(pipe, recipe=CACHED)
    most, sizes = [], []

    def count(*_):
        most.append(len(kept(handle)))
        for entry in kept(handle):
            states = [x for _, features in entry.features._kept for x in features]
            sizes.append(sum(x.untyped_storage().nbytes() for x in states))

    pipe.unet.register_forward_hook(may_skip(count))
    sample(pipe, num_inference_steps=10)
    assert set(most) == {0, 1}
    assert most[-1] == 0  # at the last timestep
    # as the docs say: order + 1 states of the finest level for each image and pass, and one for corrections
    assert max(sizes) == 3 * 2 * 16 * 16 * 16 * 4
    caller = Guided()
    pipe.scheduler = caller.scheduler
    outputs(pipe.unet, caller, calls=range(3))
    assert kept(handle)
    pipe.maybe_free_model_hooks()
    assert not kept(handle)
    assert handle._hook.skipped.feature_hook.computed is None


def test_of_cached_calls_the_last_alone_keeps_what_it_was_given():
    caller = Guided(10)
    handle = apply_agentsd(caller.pipe(unet := make_small_unet()), recipe=Recipe(steps=StepCache(4)))
    outputs(unet, caller, calls=range(4))
    [memory] = kept(handle)
    assert [bool(one.inputs) for one in memory.cached] == [False, False, True]
