"""State that lives across calls, where it could go wrong."""

import copy
import gc
import io
import pickle
import threading
import weakref

import diffusers
import pytest
import torch
from callers import Guided
from logs import warned
from tiny import BETAS, kept, make_small_unet, make_unet, may_skip, snapshot

from agentsd import Recipe, StepCache, apply_agentsd, remove_agentsd

CACHED = Recipe(steps=StepCache(2))
RUN = {"num_inference_steps": 10}


@pytest.fixture
def ddim(make_pipeline):
    """A pipeline with DDIM."""
    return make_pipeline(scheduler=diffusers.DDIMScheduler(**BETAS, steps_offset=1, clip_sample=False))


def whole(unet):
    """No block of the model is replaced."""
    return not any("forward" in vars(module) for module in unet.modules())


@pytest.mark.parametrize(
    ("place", "error", "at"),
    [
        ("down", ZeroDivisionError, 3),
        ("down", KeyboardInterrupt, 3),
        ("up", ZeroDivisionError, 3),
        ("last", ZeroDivisionError, 2),
        ("last", KeyboardInterrupt, 2),
    ],
)
def test_an_exception_in_a_call_leaves_the_next_run_clean(ddim, sample, place, error, at):
    handle = apply_agentsd(ddim, recipe=CACHED)
    before, image = snapshot(ddim.unet), sample(ddim, **RUN)
    blocks = {"down": ddim.unet.down_blocks[1], "up": ddim.unet.up_blocks[0], "last": ddim.unet.conv_out}
    calls = []

    def fail(module, args, output):
        calls.append(None)
        if len(calls) == at:
            raise error

    hook = blocks[place].register_forward_hook(may_skip(fail))
    with pytest.raises(error):
        sample(ddim, **RUN)
    hook.remove()
    if error is ZeroDivisionError:
        assert snapshot(ddim.unet) == before
        assert not kept(handle)
    assert torch.equal(sample(ddim, **RUN), image)
    handle.remove()
    assert whole(ddim.unet)


def test_an_interrupted_call_is_undone_by_removal(ddim, sample):
    before, baseline = snapshot(ddim.unet), sample(ddim, **RUN)
    handle = apply_agentsd(ddim, recipe=CACHED)
    calls = []

    def fail(module, args):
        calls.append(None)
        if len(calls) == 2:
            raise KeyboardInterrupt

    hook = ddim.unet.conv_out.register_forward_pre_hook(may_skip(fail))
    with pytest.raises(KeyboardInterrupt):
        sample(ddim, **RUN)
    hook.remove()
    assert not whole(ddim.unet)  # nobody was told of the interrupt
    handle.remove()
    assert snapshot(ddim.unet) == before
    assert torch.equal(sample(ddim, **RUN), baseline)


def test_states_are_let_go_when_a_run_ends_or_breaks_off(ddim, sample):
    handle = apply_agentsd(ddim, recipe=CACHED)
    most = []
    ddim.unet.register_forward_hook(may_skip(lambda *_: most.append(len(kept(handle)))))
    sample(ddim, **RUN)
    assert set(most) == {0, 1}
    assert most[-1] == 0  # at the last timestep
    caller = Guided()
    ddim.scheduler = caller.scheduler
    for i in range(3):
        caller(ddim.unet, i)
    assert kept(handle)
    ddim.maybe_free_model_hooks()
    assert not kept(handle)
    assert handle._hook.skipped.feature_hook.computed is None


def test_no_reference_cycle_holds_the_model():
    unet, caller = make_unet(), Guided()
    handle = apply_agentsd(unet, recipe=CACHED)
    for i in range(4):
        caller(unet, i)
    gone = weakref.ref(unet.down_blocks[0])
    gc.disable()
    try:
        del unet, handle
        assert gone() is None
    finally:
        gc.enable()


def test_states_take_the_memory_that_the_docs_say(ddim, sample):
    """`order + 1` states of the finest level for each image and pass, and one more, as they are corrected."""
    handle = apply_agentsd(ddim, recipe=CACHED)
    most = []

    def count(*_):
        for entry in kept(handle):
            tensors = [x for _, features in entry.features._kept for x in features]
            most.append(sum(t.untyped_storage().nbytes() for t in tensors))

    ddim.unet.register_forward_hook(may_skip(count))
    sample(ddim, **RUN)
    assert max(most) == 3 * 2 * 16 * 16 * 16 * 4


CHANGES = {
    "batch": {"num_images_per_prompt": 2},
    "size": {"height": 24, "width": 40},
    "prompt": {"prompt": "a dog"},
    "negative prompt": {"negative_prompt": "a dog"},
    "steps": {"num_inference_steps": 13},
    "seed": {"seed": 3},
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_run_knows_nothing_of_the_run_before(make_pipeline, ddim, sample, name):
    apply_agentsd(ddim, recipe=CACHED)
    sample(ddim, **RUN)
    image = sample(ddim, **RUN | CHANGES[name])
    fresh = make_pipeline(scheduler=ddim.scheduler)
    apply_agentsd(fresh, recipe=CACHED)
    assert torch.equal(sample(fresh, **RUN | CHANGES[name]), image)


def test_a_run_without_guidance_after_one_with_it(make_pipeline, ddim, sample):
    def run(pipe):
        rng = torch.Generator().manual_seed(0)
        return pipe("a cat", guidance_scale=1.0, output_type="latent", generator=rng, **RUN).images

    fresh = make_pipeline(scheduler=ddim.scheduler)
    for pipe in (ddim, fresh):
        apply_agentsd(pipe, recipe=CACHED)
    sample(ddim, **RUN)
    assert torch.equal(run(ddim), run(fresh))
    assert ddim.unet._agentsd.summary().startswith("FfFfFfFfFf ")


def test_another_scheduler_dtype_or_list(make_pipeline, ddim, sample):
    handle = apply_agentsd(ddim, recipe=CACHED)
    sample(ddim, **RUN)
    ddim.scheduler = diffusers.HeunDiscreteScheduler.from_config(ddim.scheduler.config)
    heun = sample(ddim, **RUN)
    fresh = make_pipeline(scheduler=ddim.scheduler)
    apply_agentsd(fresh, recipe=CACHED)
    assert torch.equal(sample(fresh, **RUN), heun)
    ddim.to(dtype=torch.bfloat16)
    assert sample(ddim, **RUN).isfinite().all()
    assert set(handle.summary().split()[0]) == set("Ff")


def test_a_prompt_that_changes_in_the_middle_is_computed(ddim, sample):
    handle = apply_agentsd(ddim, recipe=CACHED)

    def change(pipe, step, t, tensors):
        if step == 4:
            tensors["prompt_embeds"] = tensors["prompt_embeds"].flip(0)
        return tensors

    callback = {"callback_on_step_end": change, "callback_on_step_end_tensor_inputs": ["prompt_embeds"]}
    sample(ddim, **RUN, **callback)
    assert handle.summary().startswith("FfFfFFFfFf ")


def test_text_that_is_new_in_each_call_keeps_the_run_whole(ddim):
    handle = apply_agentsd(ddim, recipe=CACHED)
    baseline = make_unet()
    caller = Guided()

    def run():
        for i in range(10):
            caller.text = caller.text.clone()
            assert torch.equal(caller(ddim.unet, i), caller(baseline, i))

    with warned("another text or a new tensor of it"):
        run()
    assert handle.summary().startswith("FFFFFFFFFF ")


def test_a_run_without_a_list_of_steps_is_whole(sample):
    unet, baseline, caller = make_unet(), make_unet(), Guided()
    caller.timesteps = [int(t) for t in caller.timesteps]
    apply_agentsd(unet, recipe=CACHED)
    with warned(r"pass elements of scheduler.timesteps to the U-Net"):
        outs = [caller(unet, i) for i in range(10)]
    assert all(torch.equal(out, caller(baseline, i)) for i, out in enumerate(outs))


def test_under_gradients_a_call_is_whole():
    unet, baseline, caller = make_unet(), make_unet(), Guided()
    handle = apply_agentsd(unet, recipe=CACHED)
    for model in (unet, baseline):
        for i in range(3):
            with warned("gradients are on") if (model, i) == (unet, 0) else no_op():
                out = model(caller.latents[i], caller.timesteps[i], caller.text).sample
        out.square().mean().backward()
    for ours, theirs in zip(unet.parameters(), baseline.parameters(), strict=True):
        assert (ours.grad is None and theirs.grad is None) or torch.equal(ours.grad, theirs.grad)
    assert handle.summary().startswith("FFF ")
    assert not kept(handle)


class no_op:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


@pytest.mark.parametrize(("way", "after"), [("deepcopy", 0), ("deepcopy", 3), ("pickle", 3), ("torch", 3)])
def test_a_copy_works_on_its_own(way, after):
    unet, caller = make_unet(), Guided()
    handle = apply_agentsd(unet, recipe=CACHED)
    for i in range(after):
        caller(unet, i)
    if way == "deepcopy":
        twin = copy.deepcopy(unet)
    elif way == "pickle":
        twin = pickle.loads(pickle.dumps(unet))
    else:
        file = io.BytesIO()
        torch.save(unet, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    with torch.no_grad():
        for parameter in unet.parameters():
            parameter.zero_()
    expected = make_unet()
    apply_agentsd(expected, recipe=CACHED)
    again = Guided()
    for i in range(10):
        assert torch.equal(again(twin, i), again(expected, i))
    assert twin._agentsd.summary() == expected._agentsd.summary()
    assert handle.summary().startswith("FfF"[:after] or "no call")
    remove_agentsd(twin)
    assert whole(twin)
    assert not hasattr(twin, "_reset_stateful_cache")


def test_two_pipelines_on_one_unet_by_turns(make_pipeline, ddim, sample):
    """Also call by call: neither run gets the other's states."""
    other = make_pipeline(unet=ddim.unet, scheduler=diffusers.EulerDiscreteScheduler(**BETAS))
    ddim.another = other.scheduler  # known, so that nothing is to be said
    alone = [sample(pipe, **RUN) for pipe in (ddim, other)]
    apply_agentsd(ddim, recipe=CACHED)
    expected = [sample(pipe, **RUN) for pipe in (ddim, other)]
    assert not any(torch.equal(a, b) for a, b in zip(alone, expected, strict=True))
    assert torch.equal(sample(ddim, **RUN), expected[0])

    one, two = Guided(), Guided(seed=1)
    alone = []
    for caller in (one, two):
        with apply_agentsd(unet := make_unet(), recipe=CACHED):
            alone.append([caller(unet, i) for i in range(10)])
    for i in range(10):
        for caller, outputs in zip((one, two), alone, strict=True):
            assert torch.equal(caller(ddim.unet, i), outputs[i])


def test_threads_that_take_turns_each_have_their_own_states(make_pipeline):
    unet, lock, made = make_unet(), threading.Lock(), {}
    expected = make_unet()
    apply_agentsd(expected, recipe=CACHED)
    apply_agentsd(unet, recipe=CACHED)
    turn = threading.Barrier(2)

    def work(seed):
        caller, outs = Guided(seed=seed), []
        for i in range(10):
            turn.wait()
            with lock:
                outs.append(caller(unet, i))
        made[seed] = outs

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, outs in made.items():
        caller = Guided(seed=seed)
        for i, out in enumerate(outs):
            assert torch.equal(out, caller(expected, i))


def test_applied_and_removed_in_the_middle_of_a_run(ddim, sample):
    baseline, seen = sample(ddim, **RUN), []

    def step(pipe, i, t, tensors):
        if i == 1:
            seen.append(apply_agentsd(pipe, recipe=CACHED))
        if i == 5:
            seen[0].remove()
            assert whole(pipe.unet)
        return tensors

    image = sample(ddim, **RUN, callback_on_step_end=step)
    assert seen[0].summary().startswith("FfFf ")
    assert not torch.equal(image, baseline)
    assert torch.equal(sample(ddim, **RUN), baseline)


def test_forty_runs_leave_no_hook_and_no_tensor():
    unet, caller = make_small_unet(), Guided(steps=8, size=(8, 8))
    before = snapshot(unet)

    def count():
        gc.collect()
        return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())  # isinstance asks proxies

    counts = []
    for i in range(40):
        if i % 5 == 0:
            handle = apply_agentsd(unet, recipe=CACHED)
        for j in range(8 if i % 3 else 5):  # a third of them break off
            caller(unet, j)
        if i % 5 == 4:
            handle.remove()
            assert snapshot(unet) == before
            counts.append(count())
    assert len(set(counts[1:])) == 1
