"""Threads that share a patched U-Net: one call at a time, and each thread's run is its own."""

import gc
import threading
import weakref

import diffusers
import pytest
import torch
from callers import Guided, ddim, draw, equal, inputs, outputs
from recipes import AGENTS_THEN_KEYS, STEP_CACHING
from tiny import BETAS, call, make_unet

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


def test_a_thread_that_died_in_a_call_locks_nobody_out():
    unet = make_unet()
    apply_agentsd(unet, recipe=AGENTS_THEN_KEYS)
    alone = call(unet)
    hook = unet.mid_block.register_forward_pre_hook(lambda *_: 1 / 0)
    assert isinstance(in_a_thread(lambda: call(unet)), ZeroDivisionError)
    hook.remove()
    assert torch.equal(call(unet), alone)


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


@pytest.mark.parametrize("recipe", [AGENTS_THEN_KEYS, Recipe(ByDistance((Agents(), None), (0.9,)))])
def test_threads_that_take_turns_each_get_their_own_image(make_pipeline, recipe):
    """Two pipelines share a U-Net and change over after every step."""
    pipe = make_pipeline()
    other = make_pipeline(unet=pipe.unet, scheduler=diffusers.EulerDiscreteScheduler(**BETAS))
    jobs = [(pipe, 5), (other, 8)]
    apply_agentsd(pipe, recipe=recipe)

    def make_image(job, **more):
        pipe, steps = job
        return draw(pipe, num_inference_steps=steps, **more)

    alone = [make_image(job) for job in jobs]
    turns, done = [threading.Semaphore(1), threading.Semaphore(0)], [False, False]

    def work(me):
        def change_over(pipe, step, t, tensors):
            if not done[1 - me]:
                turns[1 - me].release()
                assert turns[me].acquire(timeout=60)
            return tensors

        assert turns[me].acquire(timeout=60)
        try:
            return make_image(jobs[me], callback_on_step_end=change_over)
        finally:
            done[me] = True
            turns[1 - me].release()

    assert equal(together(work), alone)


def test_threads_that_take_turns_each_have_their_own_states_and_summary():
    recipe, lock, turn = Recipe(steps=StepCache(2)), threading.Lock(), threading.Barrier(2)
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


def test_two_models_with_different_settings_in_two_threads():
    jobs = [(make_unet(), {"ratio": 0.3}, 999), (make_unet(), {"ratio": 0.6, "seed": 1}, 1)]
    for unet, options, _ in jobs:
        apply_agentsd(unet, **options)
    alone = [call(unet, t) for unet, _, t in jobs]

    def work(me):
        unet, _, t = jobs[me]
        return all(torch.equal(call(unet, t), alone[me]) for _ in range(10))

    assert together(work) == [True, True]


def test_requests_that_died_in_other_threads_keep_nothing():
    handle = apply_agentsd(unet := make_unet(), recipe=STEP_CACHING)
    kept, started, over, lock = [], threading.Barrier(4), threading.Event(), threading.Lock()

    def request(number):
        latent, text = inputs(number)
        kept.append(weakref.ref(text))
        for t in ddim(12).timesteps[:5]:
            with lock, torch.no_grad():
                unet(latent, t, text)
        del latent, text
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
