"""Threads that share a patched U-Net: one call at a time, and each thread's run is its own."""

import threading

import pytest
import torch
from callers import Guided, equal, outputs
from recipes import AGENTS_THEN_KEYS
from tiny import call, make_unet

from agentsd import Agents, ByDistance, Recipe, StepCache, apply_agentsd


def in_a_thread(work):
    """What a function returns or raises in a thread of its own."""
    outcome = []

    def run():
        try:
            outcome.append(work())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    return outcome[0]


def together(work, count=2):
    """Run a function of the thread's number in so many threads at once: what each returns."""
    found = {}
    threads = [threading.Thread(target=lambda me=me: found.setdefault(me, work(me))) for me in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return [found[me] for me in range(count)]


def test_a_second_thread_inside_a_call_is_refused():
    unet = make_unet()
    apply_agentsd(unet, recipe=AGENTS_THEN_KEYS)
    alone, other = call(unet), []

    def intrude(*_):
        hook.remove()
        other.append(in_a_thread(lambda: call(unet, 1)))

    hook = unet.mid_block.register_forward_pre_hook(intrude)
    assert torch.equal(call(unet), alone)
    assert isinstance(other[0], RuntimeError)
    assert "in a call of another thread" in str(other[0])
    assert "copy.deepcopy" in str(other[0])
    assert torch.equal(in_a_thread(lambda: call(unet)), alone)


def test_after_an_interruption_in_a_call_another_thread_is_let_in():
    """The thread that was interrupted lives on, outside of the call."""
    unet = make_unet()
    apply_agentsd(unet, recipe=AGENTS_THEN_KEYS)
    alone = call(unet)

    def interrupt(module, args):
        hook.remove()
        raise KeyboardInterrupt

    hook = unet.mid_block.register_forward_pre_hook(interrupt)
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

    made = together(work)
    for seed, (outs, summary) in enumerate(made):
        assert equal(outs, outputs(expected, Guided(seed=seed)))
        assert summary.startswith("FfFfFfFfFf  (10 calls")
    assert handle.summary() in [summary for _, summary in made]  # this thread made no call: the last of any
