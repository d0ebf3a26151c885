"""The patch in every kind of pipeline with a U-Net that a Stable Diffusion user would try."""

import diffusers
import pytest
import torch
from pipelines import HOSTS
from recipes import AGENTS_THEN_KEYS
from tiny import (
    BETAS,
    WIDTH,
    make_text_encoder,
    make_unet,
    make_vae,
    sdxl_parts,
    sdxl_unet,
    watch_phases,
)

from agentsd import Agents, Downsample, Phases, Recipe, StepCache, apply_agentsd, remove_agentsd
from agentsd.plan import Call
from agentsd.recipe import AGENTSD


@pytest.fixture
def build(make_pipeline, tokenizer):
    """Build a host: the pipeline, and a function that runs it to its latents."""

    def make(name):
        cls, unet, parts, inputs = HOSTS[name](tokenizer)
        pipe = make_pipeline(unet=unet, cls=cls, **parts)

        def run():
            torch.manual_seed(0)
            settings = {"prompt": "a cat", "num_inference_steps": 6, "output_type": "latent"} | inputs
            return pipe(generator=torch.Generator().manual_seed(0), **settings)[0]

        return pipe, run

    return make


@pytest.mark.parametrize("name", HOSTS)
def test_host(build, name):
    """Both phases run in every patched layer, the image changes, and all of it can be undone."""
    pipe, run = build(name)
    baseline = run()
    processors = dict(pipe.unet.attn_processors)
    for recipe, later in ((AGENTSD, "merge"), (AGENTS_THEN_KEYS, "downsample")):
        handle = apply_agentsd(pipe, recipe=recipe)
        seen = watch_phases(handle)
        patched = run()
        assert patched.isfinite().all()
        assert not torch.equal(patched, baseline)
        for phases in seen.values():
            assert set(phases) == {"agent", later}
        assert not any("motion_modules" in layer for layer in handle.layer_names)
    assert torch.equal(run(), patched)
    remove_agentsd(pipe)
    assert torch.equal(run(), baseline)
    assert {k: id(v) for k, v in pipe.unet.attn_processors.items()} == {
        k: id(v) for k, v in processors.items()
    }


def test_the_controlnets_own_attention_is_patched_only_when_asked(build):
    pipe, run = build("ControlNet")
    baseline = run()
    before = dict(pipe.controlnet.attn_processors)
    apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS)
    unet_only = run()
    assert {k: id(v) for k, v in pipe.controlnet.attn_processors.items()} == {
        k: id(v) for k, v in before.items()
    }
    handle = apply_agentsd(pipe.controlnet, recipe=AGENTS_THEN_KEYS)
    assert not torch.equal(run(), unet_only)
    handle.remove()
    assert torch.equal(run(), unet_only)
    remove_agentsd(pipe)
    assert torch.equal(run(), baseline)


def test_textual_inversion_after_the_patch(make_pipeline, sample):
    """The word means the same whether it was taught before or after the patch."""
    concept = {"<cat>": torch.ones(1, WIDTH)}
    before, after = make_pipeline(), make_pipeline()
    before.load_textual_inversion(concept, token="<cat>")
    apply_agentsd(before, recipe=AGENTS_THEN_KEYS)
    apply_agentsd(after, recipe=AGENTS_THEN_KEYS)
    untaught = sample(after, prompt="<cat>")
    after.load_textual_inversion(concept, token="<cat>")
    assert torch.equal(sample(after, prompt="<cat>"), sample(before, prompt="<cat>"))
    assert not torch.equal(sample(after, prompt="<cat>"), untaught)


@pytest.mark.parametrize("recipe", [AGENTSD, AGENTS_THEN_KEYS])
@pytest.mark.parametrize("timestep", [999, 1])
def test_upcast_attention_does_not_overflow_in_half_precision(recipe, timestep):
    """Queries and keys whose products pass 65,504, as SD 2.1's do."""
    unet = make_unet(upcast_attention=True)
    handle = apply_agentsd(unet, recipe=recipe)
    with torch.no_grad():
        for site in handle._layers.attention_layers:
            site.attn.to_q.weight.mul_(600)
            site.attn.to_k.weight.mul_(600)
    unet.to(torch.float16)
    latent = torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(0)).half()
    with torch.no_grad():
        out = unet(latent, torch.tensor(timestep), torch.zeros(2, 7, WIDTH).half()).sample
    assert out.isfinite().all()


@pytest.fixture
def modular(tokenizer):
    """A modular pipeline of SDXL, and a function that runs it: a guider calls once for each pass."""
    blocks = pytest.importorskip("diffusers.modular_pipelines", reason="this diffusers has none")
    guiders = pytest.importorskip("diffusers.guiders")
    pipe = blocks.StableDiffusionXLAutoBlocks().init_pipeline()
    pipe.update_components(
        vae=make_vae(),
        text_encoder=make_text_encoder(tokenizer),
        tokenizer=tokenizer,
        unet=sdxl_unet(),
        scheduler=diffusers.EulerDiscreteScheduler(**BETAS),
        guider=guiders.ClassifierFreeGuidance(guidance_scale=5.0),
        **sdxl_parts(tokenizer),
    )
    pipe.set_progress_bar_config(disable=True)

    def run():
        rng = torch.Generator().manual_seed(0)
        inputs = {"prompt": "a cat", "height": 32, "width": 32, "num_inference_steps": 8}
        return pipe(generator=rng, output="images", output_type="latent", **inputs)

    return pipe, run


def test_modular_guiders_share_phases_and_have_states_of_their_own(modular):
    pipe, run = modular
    baseline = run()
    handle = apply_agentsd(pipe, recipe=Recipe(Phases(Agents(destinations="random"), Downsample())))
    seen = watch_phases(handle)
    patched = run()
    assert not torch.equal(patched, baseline)
    for phases in seen.values():  # eight steps, three of them early, two branches
        assert phases == ["agent"] * 6 + ["downsample"] * 10
    assert torch.equal(run(), patched)
    handle = apply_agentsd(pipe, recipe=Recipe(steps=StepCache(2)))
    cached = run()
    assert handle.summary().split()[0] == "FFff" * 4  # by the pass's text; nothing is there to be halved
    assert (cached - baseline).norm() < 0.3 * baseline.norm()
    assert torch.equal(run(), cached)
    remove_agentsd(pipe)
    assert torch.equal(run(), baseline)


def test_masks_and_cross_attention_are_untouched():
    unet = make_unet()
    rng = torch.Generator().manual_seed(0)
    attn = unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1
    tokens = torch.randn(2, 256, 16, generator=rng)
    mask = torch.zeros(2, 1, 256).masked_fill(torch.rand(2, 1, 256, generator=rng) < 0.5, -10000.0)
    other = torch.randn(2, 9, 16, generator=rng)

    def outputs():
        with torch.no_grad():
            return attn(tokens, attention_mask=mask), attn(tokens, encoder_hidden_states=other)

    baseline = outputs()
    cross = {n: p for n, p in unet.attn_processors.items() if "attn2" in n}
    handle = apply_agentsd(unet, recipe=AGENTS_THEN_KEYS)
    handle._layers.begin(Call(torch.empty(2, 4, 16, 16), 999.0, 0), None)
    assert handle._layers.processors[0].group.plan is not None
    assert all(torch.equal(a, b) for a, b in zip(outputs(), baseline, strict=True))
    assert {n: p for n, p in unet.attn_processors.items() if "attn2" in n} == cross
