"""Threads that share a patched U-Net: one call at a time, and each thread's run is its own."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from callers import Guided, equal, outputs, plant
from recipes import AGENTS_THEN_KEYS
from tiny import call, make_unet

from agentsd import Agents, ByDistance, Recipe, StepCache, apply_agentsd


def in_a_thread(work):
    """What a function returns or raises in a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(60)


def test_a_second_thread_inside_a_call_is_refused():
    unet = make_unet()
    apply_agentsd(unet, recipe=AGENTS_THEN_KEYS)
    alone, refused = call(unet), []

    def intrude(*_):
        hook.remove()
        with pytest.raises(RuntimeError, match=r"in a call of another thread.*copy\.deepcopy"):
            in_a_thread(lambda: call(unet, 1))
        refused.append(True)

    hook = unet.mid_block.register_forward_pre_hook(intrude)
    assert torch.equal(call(unet), alone)
    assert refused
    assert torch.equal(in_a_thread(lambda: call(unet)), alone)


def test_after_an_interruption_in_a_call_another_thread_is_let_in():
    """The thread that was interrupted lives on, outside of the call."""
    unet = make_unet()
    apply_agentsd(unet, recipe=AGENTS_THEN_KEYS)
    alone = call(unet)
    plant(unet, "mid_block", KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        call(unet)
    assert torch.equal(in_a_thread(lambda: call(unet)), alone)


@pytest.mark.parametrize(
    "recipe", [Recipe(steps=StepCache(2)), Recipe(ByDistance((Agents(), None), (0.9,)), steps=StepCache(2))]
)
def test_threads_that_take_turns_each_have_their_own_states_and_summary(recipe):
    lock, turn = threading.Lock(), threading.Barrier(2)
    handle = apply_agentsd(unet := make_unet(), recipe=recipe)
    apply_agentsd(expected := make_unet(), recipe=recipe)

    def work(seed):
        caller, outs = Guided(seed=seed), []
        for i in range(10):
            turn.wait(60)
            with lock:
                outs.append(caller(unet, i))
        return outs, handle.summary()

    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(work, range(2)))
    for seed, (outs, summary) in enumerate(made):
        assert equal(outs, outputs(expected, Guided(seed=seed)))
        assert summary.startswith("FfFfFfFfFf  (10 calls")
    assert handle.summary() in [summary for _, summary in made]  # this thread made no call: the last of any
