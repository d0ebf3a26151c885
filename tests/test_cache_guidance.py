"""Conditional-only steps between guided ones."""

import diffusers
import pytest
import torch
from callers import RUN, Guided, deep_unet
from logs import warned
from tiny import BETAS, WIDTH, kept, make_sdxl_unet, make_unet, may_skip, snapshot

from agentsd import Agents, Downsample, GuidanceCache, Phases, Recipe, StepCache, apply_agentsd
from agentsd.cache.conditional import both_passes, conditional_half, difference_of, is_guided

HALVES = Recipe(guidance=GuidanceCache())


def ddim(make_pipeline, **parts):
    scheduler = diffusers.DDIMScheduler(**BETAS, steps_offset=1, clip_sample=False)
    return make_pipeline(scheduler=scheduler, **parts)


def test_a_conditional_only_step_is_the_conditional_pass_and_the_kept_difference():
    unet, twin, caller = make_unet(), make_unet(), Guided(batch=4)
    handle = apply_agentsd(unet, recipe=HALVES)
    first = caller(unet, 0)
    assert torch.equal(first, caller(twin, 0))
    out = caller(unet, 1)
    with torch.no_grad():
        alone = twin(caller.latents[1][2:], caller.timesteps[1], caller.text[2:]).sample
    assert torch.equal(out[2:], alone)
    torch.testing.assert_close(out[2:] - out[:2], first[2:] - first[:2], rtol=0, atol=1e-6)
    assert handle.summary().startswith("FH ")


def test_the_true_difference_gives_baselines_image(make_pipeline, sample):
    pipe, twin = ddim(make_pipeline), make_unet()
    baseline = sample(pipe, **RUN)
    handle = apply_agentsd(pipe, recipe=HALVES)
    image = sample(pipe, **RUN)
    assert not torch.allclose(image, baseline, atol=1e-3)

    def tell_true_difference(unet, args, kwargs):
        for entry in kept(handle):
            entry.difference = difference_of(twin(*args, **kwargs)[0])

    pipe.unet.register_forward_pre_hook(may_skip(tell_true_difference), with_kwargs=True, prepend=True)
    torch.testing.assert_close(sample(pipe, **RUN), baseline, rtol=1e-4, atol=1e-4)
    assert handle.summary().startswith("FHFHFHFHFH ")


@pytest.mark.parametrize("rescale", [0.0, 0.7])
def test_the_difference_is_kept_between_guided_steps(make_pipeline, sample, rescale):
    """A pipeline by hand: what `guidance_rescale` and the scheduler get has both halves."""
    pipe, twin = ddim(make_pipeline), make_unet()
    apply_agentsd(pipe, recipe=Recipe(guidance=GuidanceCache(3)))
    image = sample(pipe, guidance_rescale=rescale, **RUN)
    calls = []

    def by_hand(latents, t, text, **more):
        with torch.no_grad():
            if len(calls) % 3 == 0:
                both = twin(latents, t, text).sample
                calls.append(both[1:] - both[:1])
                return (both,)
            conditional = twin(latents[1:], t, text[1:]).sample
            calls.append(calls[-1])
            return (torch.cat([conditional - calls[-1], conditional]),)

    pipe = ddim(make_pipeline)
    pipe.unet.forward = lambda *args, return_dict=None, encoder_hidden_states=None, **kwargs: by_hand(
        *args, encoder_hidden_states
    )
    torch.testing.assert_close(sample(pipe, guidance_rescale=rescale, **RUN), image, rtol=0, atol=1e-5)


def test_every_argument_of_a_conditional_only_step_is_halved():
    """SDXL's conditions, masks, a time condition, residuals and labels: the twin gets the halves by hand."""
    changes = {
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 6 * 8 + WIDTH,
        "num_class_embeds": 5,
        "time_cond_proj_dim": 8,
    }
    unet, twin, caller = make_sdxl_unet(**changes), make_sdxl_unet(**changes), Guided(batch=4)
    rng = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=rng)

    down = [(16, 16), *[(16, 16)], *[(16, 8)], *[(32, 8)], *[(32, 4)], *[(32, 4)]]
    more = {
        "class_labels": torch.tensor([1, 2, 3, 4]),
        "timestep_cond": draw(4, 8),
        "added_cond_kwargs": {"text_embeds": draw(4, WIDTH), "time_ids": draw(4, 6)},
        "encoder_attention_mask": torch.rand(4, 7, generator=rng) > 0.5,
        "down_block_additional_residuals": [draw(4, c, side, side) for c, side in down],
        "mid_block_additional_residual": draw(4, 32, 4, 4),
    }
    apply_agentsd(unet, recipe=HALVES)
    assert torch.equal(caller(unet, 0, **more), caller(twin, 0, **more))
    out = caller(unet, 1, **more)
    halved = {
        name: {k: v[2:] for k, v in value.items()}
        if isinstance(value, dict)
        else [v[2:] for v in value]
        if isinstance(value, list)
        else value[2:]
        for name, value in more.items()
    }
    with torch.no_grad():
        alone = twin(caller.latents[1][2:], caller.timesteps[1], caller.text[2:], **halved).sample
    assert torch.equal(out[2:], alone)


def test_halves_of_what_a_call_gets():
    batch = torch.arange(4)
    assert conditional_half(batch, 4).tolist() == [2, 3]
    assert conditional_half({"a": [batch, (batch,)]}, 4)["a"][1][0].tolist() == [2, 3]
    assert conditional_half(torch.arange(8), 4).tolist() == [4, 5, 6, 7]  # a video's frames
    for other in (torch.tensor(5), torch.arange(1), torch.arange(3), None, "x", 0.5):
        assert conditional_half(other, 4) is other
    out = torch.randn(4, 3)
    torch.testing.assert_close(both_passes(out[2:], difference_of(out)), out)


def test_an_even_batch_alone_proves_nothing():
    latents, text = torch.randn(2, 4, 8, 8), torch.randn(2, 7, 16)
    twice = torch.cat([latents[:1]] * 2)
    assert is_guided(twice, text)
    assert not is_guided(latents, text)
    assert not is_guided(twice, torch.cat([text[:1]] * 2))  # perturbed attention's pair
    assert not is_guided(torch.cat([latents[:1]] * 3), torch.randn(3, 7, 16))
    assert not is_guided(latents[:1], text[:1])


def run(pipe, **settings):
    rng = torch.Generator().manual_seed(0)
    return pipe(generator=rng, output_type="latent", **{"prompt": "a cat"} | RUN | settings).images


def test_without_guidance_nothing_is_halved_and_it_is_said(make_pipeline):
    pipe = ddim(make_pipeline)
    one = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(0))
    two = {"prompt": ["a cat", "a dog"], "latents": torch.cat([one] * 2), "guidance_scale": 1.0}
    for settings in ({"guidance_scale": 1.0}, two):  # two prompts on the same latents, as guidance has them
        baseline = run(pipe, **settings)
        with apply_agentsd(pipe, recipe=HALVES) as handle:
            with warned("no guidance of two passes was found"):
                assert torch.equal(run(pipe, **settings), baseline)
            assert handle.summary() == "FFFFFFFFFF  (10 calls: 10 computed)"
        alone = apply_agentsd(pipe.unet, recipe=HALVES)  # it knows no pipeline to ask
        with alone, warned("no guidance of two passes was found"):
            assert torch.equal(run(pipe, **settings), baseline)


@pytest.mark.parametrize(
    ("steps", "guidance", "symbols"),
    [
        (None, {}, "FHFHFHFHFH"),
        (None, {"interval": 1}, "FFFFFFFFFF"),
        (None, {"start": 0.4}, "FFFFFHFHFH"),
        ({"interval": 2}, {}, "FfHhFfHhFf"),
        ({"interval": 3}, {}, "FffHhhFffH"),
        ({"interval": 3}, {"interval": 3}, "FffHhhHhhF"),
        ({"interval": 2}, {"start": 0.3}, "FfFfFfHhFf"),
    ],
)
def test_computed_and_guided_steps_are_planned_together(make_pipeline, sample, steps, guidance, symbols):
    pipe = ddim(make_pipeline, unet=deep_unet())
    before, baseline = snapshot(pipe.unet), sample(pipe, **RUN)
    recipe = Recipe(steps=steps and StepCache(**steps), guidance=GuidanceCache(**guidance))
    handle = apply_agentsd(pipe, recipe=recipe)
    image = sample(pipe, **RUN)
    assert handle.summary().split()[0] == symbols
    assert torch.equal(image, baseline) == (set(symbols) == {"F"})
    assert torch.equal(sample(pipe, **RUN), image)
    handle.remove()
    assert snapshot(pipe.unet) == before
    assert torch.equal(sample(pipe, **RUN), baseline)


def test_a_cached_conditional_only_step_has_the_conditional_passs_own_states():
    """A twin's deep blocks return the last computed step's states of the conditional half."""
    unet, twin, caller = deep_unet(), deep_unet(), Guided(batch=2)
    steps = StepCache(2, extrapolation_order=0, correct=False)
    apply_agentsd(unet, recipe=Recipe(steps=steps, guidance=GuidanceCache()))
    kept = {}

    def swap(module, args, output):
        if kept["cached"]:
            return (kept["state"],)
        kept["state"] = output[0]
        return None

    twin.up_blocks[-1].attentions[-2].register_forward_hook(may_skip(swap))
    outs = [caller(unet, i) for i in range(4)]  # F f H h
    for i in (2, 3):
        kept["cached"] = i == 3
        with torch.no_grad():
            alone = twin(caller.latents[i][1:], caller.timesteps[i], caller.text[1:]).sample
        assert torch.equal(outs[i][1:], alone)
        torch.testing.assert_close(outs[i][1:] - outs[i][:1], outs[1][1:] - outs[1][:1], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "attention", [Phases(Agents(), Downsample()), Phases(Agents(destinations="random"), None), Downsample()]
)
def test_a_conditional_only_step_draws_the_cells_that_a_guided_one_does(attention):
    unet, twin, caller = make_unet(), make_unet(), Guided(batch=2)
    apply_agentsd(unet, recipe=Recipe(attention, guidance=GuidanceCache()))
    apply_agentsd(twin, recipe=Recipe(attention))
    caller(unet, 0), caller(twin, 0)
    torch.testing.assert_close(caller(unet, 1)[1:], caller(twin, 1)[1:], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"interval": 0}, "interval=0: pass 2"),
        ({"start": 1.0}, r"start=1.0: pass a share in \[0, 1\)"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        GuidanceCache(**settings)
