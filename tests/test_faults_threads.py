"""Faults that were found and mended, each a test that the old code fails: threads."""

import threading

import diffusers
import pytest
import torch
from recipes import AGENTS_THEN_KEYS
from tiny import BETAS, call, make_unet

from agentsd import Agents, ByDistance, Recipe, apply_agentsd


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


@pytest.mark.parametrize("recipe", [AGENTS_THEN_KEYS, Recipe(ByDistance((Agents(), None), (0.9,)))])
def test_threads_that_take_turns_each_get_their_own_image(make_pipeline, recipe):
    """Two pipelines share a U-Net and change over after every step."""
    pipe = make_pipeline()
    other = make_pipeline(unet=pipe.unet, scheduler=diffusers.EulerDiscreteScheduler(**BETAS))
    jobs = [(pipe, 5), (other, 8)]
    apply_agentsd(pipe, recipe=recipe)

    def make_image(job, **more):
        pipe, steps = job
        rng = torch.Generator().manual_seed(0)
        return pipe("a cat", num_inference_steps=steps, output_type="latent", generator=rng, **more).images

    alone = [make_image(job) for job in jobs]
    turns, done, made = [threading.Semaphore(1), threading.Semaphore(0)], [False, False], {}

    def work(me):
        def change_over(pipe, step, t, tensors):
            if not done[1 - me]:
                turns[1 - me].release()
                assert turns[me].acquire(timeout=60)
            return tensors

        assert turns[me].acquire(timeout=60)
        try:
            made[me] = make_image(jobs[me], callback_on_step_end=change_over)
        finally:
            done[me] = True
            turns[1 - me].release()

    threads = [threading.Thread(target=work, args=(me,)) for me in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for me in (0, 1):
        assert torch.equal(made[me], alone[me])


def test_after_an_interruption_in_a_call_another_thread_is_let_in(pipe, sample):
    """The thread that was interrupted lives on, outside of the call."""
    expected = sample(pipe)
    apply_agentsd(pipe, ratio=0.0, early_frac=0.0, mode="agentsd")  # the baseline's image

    def interrupt(module, args):
        hook.remove()
        raise KeyboardInterrupt

    hook = pipe.unet.mid_block.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        sample(pipe)
    assert torch.equal(in_a_thread(lambda: sample(pipe)), expected)
