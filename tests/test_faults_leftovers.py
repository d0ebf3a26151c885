"""Faults that were found and mended: what an interruption, a switch or a server's many calls leave behind.

Oracles: a U-Net that was never patched, a fresh handle, and counts.
"""

import copy
import gc
import sys
import threading
import tracemalloc
import weakref
from functools import partial

import diffusers
import pytest
import torch
from callers import Host, inputs
from logs import logged, silent
from recipes import STEP_CACHING
from tiny import BETAS, make_small_unet, make_unet, snapshot

from agentsd import (
    Agents,
    ByDistance,
    Downsample,
    PooledAgents,
    Recipe,
    ResidualSharing,
    apply_agentsd,
    remove_agentsd,
)
from agentsd.apply import handle_of
from agentsd.recipe import AGENTSD

RECIPES = {
    "paper": AGENTSD,
    "step-caching": STEP_CACHING,
    "residuals": Recipe(Downsample(), residual=ResidualSharing(2, warmup_steps=1)),
    "by distance": Recipe(ByDistance((PooledAgents(9), None), (0.9,))),
}


def ddim(steps=12):
    scheduler = diffusers.DDIMScheduler(**BETAS, clip_sample=False)
    scheduler.set_timesteps(steps)
    return scheduler


@torch.no_grad()
def calls(unet, timesteps, latent, text, after=lambda i: None):
    """The outputs of calls with the same latent."""
    outputs = []
    for i, t in enumerate(timesteps):
        outputs.append(unet(latent, t, text).sample)
        after(i)
    return outputs


@torch.no_grad()
def loop(unet, scheduler, timesteps, convert=lambda t: t, seed=0):
    """The latents after a guided run."""
    latent, text = inputs(seed)
    latent = latent[:1]
    for t in timesteps:
        without, withs = unet(torch.cat([latent, latent]), convert(t), text).sample.chunk(2)
        latent = scheduler.step(without + 3 * (withs - without), t, latent).prev_sample
    return latent


OFF = {
    "enabled": lambda unet, handle: setattr(handle, "enabled", False),
    "remove": lambda unet, handle: handle.remove(),
    "remove_agentsd": lambda unet, handle: remove_agentsd(unet),
    "with": lambda unet, handle: handle.__exit__(None, None, None),
}


def plant(unet, where, error):
    """Raise an error in the next call, at a place in the model."""

    def interrupt(*_):
        hook.remove()
        raise error

    hook = unet.get_submodule(where).register_forward_pre_hook(interrupt)


@pytest.mark.parametrize(
    ("off", "error"), [*((off, KeyboardInterrupt) for off in OFF), ("enabled", RuntimeError)]
)
@pytest.mark.parametrize("name", RECIPES)
def test_off_is_off_after_an_interruption(name, off, error):
    before, scheduler = make_unet(), ddim()
    expected = calls(before, scheduler.timesteps, *inputs())
    clean = snapshot(before)
    for at, where in ((1, "conv_in"), (6, "up_blocks.2"), (7, "conv_out")):
        handle = apply_agentsd(unet := make_unet(), recipe=RECIPES[name])
        strike = partial(plant, unet, where, error)
        with pytest.raises(error):
            calls(
                unet,
                ddim().timesteps,
                *inputs(),
                after=lambda i, at=at, strike=strike: i == at - 1 and strike(),
            )
        OFF[off](unet, handle)
        made = calls(unet, scheduler.timesteps, *inputs())
        assert all(map(torch.equal, made, expected))
        if off != "enabled":
            assert snapshot(unet).keys() == clean.keys()
            assert not any("forward" in vars(module) for module in unet.modules())


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("name", RECIPES)
def test_a_run_after_an_interruption_is_a_fresh_handles(name, error):
    handle = apply_agentsd(unet := make_unet(), recipe=RECIPES[name])
    fresh = apply_agentsd(other := make_unet(), recipe=RECIPES[name])
    expected = calls(other, ddim().timesteps[6:], *inputs(3))
    scheduler = ddim()
    with pytest.raises(error):
        calls(unet, scheduler.timesteps, *inputs(), after=lambda i: i == 4 and plant(unet, "conv_out", error))
    handle.reset()
    made = calls(unet, scheduler.timesteps[6:], *inputs(3))
    assert all(map(torch.equal, made, expected))
    assert handle.last_run == fresh.last_run


@pytest.mark.parametrize("recipe", [AGENTSD, Recipe(Agents()), Recipe(Downsample())])
def test_off_is_off_after_a_call_with_gradients(recipe):
    """In other sizes of the batch, too."""
    unet, stock = make_unet(), make_unet()
    handle = apply_agentsd(unet, recipe=recipe)
    latent, text = inputs()
    unet(latent, torch.tensor(900), text).sample.square().mean().backward()
    handle.enabled = False
    for batch in (2, 4, 1):
        latent, text = inputs(batch=batch)
        with torch.no_grad():
            made, expected = (one(latent, torch.tensor(500), text).sample for one in (unet, stock))
        assert torch.equal(made, expected)


@pytest.mark.parametrize("convert", [lambda t: t, int, lambda t: torch.tensor([int(t)])])
@pytest.mark.parametrize("start", ["reset", "set_timesteps"])
def test_a_run_that_was_broken_off_leaves_nothing_to_the_next(convert, start):
    class Pipe:
        def __init__(self):
            self.unet, self.scheduler = make_unet(), ddim(20)

    made = []
    for used in (True, False):
        pipe = Pipe()
        handle = apply_agentsd(pipe, recipe=STEP_CACHING)
        scheduler = pipe.scheduler
        if used:
            loop(pipe.unet, scheduler, scheduler.timesteps[:9], convert, seed=1)
        if start == "reset":
            handle.reset()
        else:
            scheduler.set_timesteps(20)
        image = loop(pipe.unet, scheduler, scheduler.timesteps[9:], convert)
        made.append((image, handle.last_run, handle.summary()))
    assert torch.equal(made[0][0], made[1][0])
    assert made[0][1:] == made[1][1:]
    assert len(made[0][1]) == 11


def test_requests_that_died_in_other_threads_keep_nothing():
    handle = apply_agentsd(unet := make_unet(), recipe=STEP_CACHING)
    kept, started, over = [], threading.Barrier(4), threading.Event()
    lock = threading.Lock()

    def request(number):
        scheduler = ddim()
        latent, text = inputs(number)
        kept.append(weakref.ref(text))
        for t in scheduler.timesteps[:5]:
            with lock, torch.no_grad():
                unet(latent, t, text)
        del latent, text, scheduler
        started.wait(60)  # cancelled here; a pool's thread lives on
        over.wait(60)

    threads = [threading.Thread(target=request, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    started.wait(60)
    assert any(one() is not None for one in kept)  # a run keeps the text it was called on
    handle.reset()
    gc.collect()
    try:
        assert all(one() is None for one in kept)
    finally:
        over.set()
        for thread in threads:
            thread.join(60)


def test_a_run_dies_with_its_scheduler():
    """Without a word to the handle: when the next run begins."""
    host = Host(unet := make_unet(), ddim())
    apply_agentsd(host, recipe=STEP_CACHING)
    latent, text = inputs()
    kept = weakref.ref(text)
    calls(unet, host.scheduler.timesteps[:6], latent, text)
    host.scheduler = ddim()
    del latent, text
    gc.collect()
    assert kept() is not None
    calls(unet, host.scheduler.timesteps[:1], *inputs(1))
    gc.collect()
    assert kept() is None


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
    begin, end = handle._hook.begin, handle._hook.end
    begin(unet, (latent, t, text), {})
    end(unet, (latent, t, text), (latent,))


SERVERS = {
    "a scheduler a request": lambda number, scheduler: scheduler.timesteps,
    "one that breaks off": lambda number, scheduler: scheduler.timesteps[: 1 + number % 8],
    "one timestep, for ever": lambda number, scheduler: [999] * 9,
    "off the list": lambda number, scheduler: [float(f"{number % 999}.{number % 7 + 1}5")] * 9,
}


@pytest.mark.parametrize(
    ("name", "server"),
    [
        ("step-caching", "a scheduler a request"),
        ("residuals", "one that breaks off"),
        ("paper", "one timestep, for ever"),
        ("step-caching", "off the list"),
    ],
)
def test_nothing_grows_in_ten_thousand_calls(name, server):
    """The model's own work is left out: it leaves nothing but what it hands to the layers."""

    class Server:
        unet = make_small_unet()

    pipe, figures = Server(), []
    handle = apply_agentsd(pipe, recipe=RECIPES[name])
    with logged() as messages:
        for number in range(1150):
            if number % 10 == 0 or server.startswith("a scheduler"):
                pipe.scheduler = ddim(9)
            latent, text = inputs(number % 5)
            for t in SERVERS[server](number, pipe.scheduler):
                enter(pipe.unet, handle, latent, t, text)
            if number in (500, 1140):
                gc.collect()
                again = partial(enter, pipe.unet, handle, latent, t, text)
                again()
                figures.append((*weight(handle), instructions(again)))
    (objects, size, steps), (later, later_size, later_steps) = figures
    assert later <= objects + 40
    assert later_size <= size
    assert later_steps <= 1.05 * steps + 20
    assert len(messages) < 8


def test_patching_again_and_again_keeps_nothing():
    unet = make_small_unet()
    apply_agentsd(unet, recipe=AGENTSD)
    for _ in range(20):
        apply_agentsd(unet, recipe=AGENTSD)
    gc.collect()
    tracemalloc.start()
    try:
        first = tracemalloc.get_traced_memory()[0]
        for _ in range(200):
            apply_agentsd(unet, recipe=AGENTSD)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - first < 60_000
    finally:
        tracemalloc.stop()


def test_blocks_that_are_left_in_another_order_end_at_the_baseline():
    unet = make_unet()
    clean = snapshot(unet)
    first = apply_agentsd(unet, recipe=AGENTSD).__enter__()
    second = apply_agentsd(unet, recipe=STEP_CACHING).__enter__()
    third = apply_agentsd(unet, recipe=AGENTSD).__enter__()
    second.__exit__(None, None, None)
    assert handle_of(unet) is third
    third.__exit__(None, None, None)
    assert handle_of(unet) is first
    first.__exit__(None, None, None)
    assert handle_of(unet) is None
    assert snapshot(unet) == clean


@pytest.mark.parametrize("away", ["remove", "remove_agentsd", "exit"])
def test_an_outer_handle_that_is_gone_does_not_come_back(away):
    unet = make_unet()
    clean = snapshot(unet)
    outer = apply_agentsd(unet, recipe=AGENTSD)
    with apply_agentsd(unet, recipe=STEP_CACHING):
        {
            "remove": outer.remove,
            "remove_agentsd": lambda: remove_agentsd(unet),
            "exit": lambda: outer.__exit__(None, None, None),
        }[away]()
    assert handle_of(unet) is None
    assert snapshot(unet) == clean


def test_removal_follows_a_pipeline_whose_unet_was_exchanged(make_pipeline, sample):
    pipe = make_pipeline()
    old = pipe.unet
    clean = snapshot(old)
    handle = apply_agentsd(pipe, recipe=AGENTSD)
    pipe.unet = make_unet()
    assert handle_of(old) is handle
    remove_agentsd(pipe)
    assert handle_of(old) is None
    assert snapshot(old) == clean


def test_a_copied_pipelines_patch_knows_the_copy(make_pipeline):
    pipe = make_pipeline(scheduler=ddim())
    apply_agentsd(pipe, recipe=STEP_CACHING)
    other = copy.deepcopy(pipe)
    other.scheduler.set_timesteps(12)
    with silent():
        loop(other.unet, other.scheduler, other.scheduler.timesteps, int)
    assert "f" in handle_of(other).summary()
    assert handle_of(other).pipe is other
    assert handle_of(copy.deepcopy(pipe.unet)).pipe is None
