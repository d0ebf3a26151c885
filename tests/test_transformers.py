"""The patch in transformers whose self-attention is plain: DiT and PixArt."""

import diffusers
import pytest
import torch
from recipes import AGENTS_THEN_KEYS
from tiny import BETAS, WIDTH, make_vae, watch_phases

from agentsd import apply_agentsd


def dit():
    torch.manual_seed(0)
    return diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2,
        sample_size=16, patch_size=2, num_embeds_ada_norm=1000,
    ).eval()  # fmt: skip


def pixart():
    torch.manual_seed(0)
    return diffusers.PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2,
        sample_size=16, patch_size=2, cross_attention_dim=16, caption_channels=WIDTH,
        use_additional_conditions=False,
    ).eval()  # fmt: skip


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (dit, {"class_labels": torch.tensor([1, 2])}),
        (pixart, {"encoder_hidden_states": torch.ones(2, 7, WIDTH)}),
    ],
)
def test_transformers_with_plain_self_attention(make, inputs):
    """Their tokens are patches of 2x2 latent pixels: an 8x8 grid, of which 4 tokens are agents."""
    model = make()
    latent = torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(0))

    def run(t):
        with torch.no_grad():
            return model(latent, timestep=torch.tensor([t, t]), **inputs).sample

    baseline = run(999), run(1)
    handle = apply_agentsd(model, recipe=AGENTS_THEN_KEYS.with_settings(ratio=0.2))
    seen = watch_phases(handle)
    for t, before in zip((999, 1), baseline, strict=True):
        assert not torch.equal(run(t), before)
    assert list(seen.values()) == [["agent", "downsample"]] * 2
    handle.remove()
    assert torch.equal(run(999), baseline[0])


def test_dit_pipeline():
    pipe = diffusers.DiTPipeline(
        transformer=dit(), vae=make_vae(), scheduler=diffusers.DDIMScheduler(**BETAS), id2label={"1": "cat"}
    )
    pipe.set_progress_bar_config(disable=True)

    def run():
        return pipe(
            [1], num_inference_steps=5, output_type="np", generator=torch.Generator().manual_seed(0)
        ).images

    baseline = run()
    with apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS.with_settings(ratio=0.2)):
        assert abs(run() - baseline).max() > 0
    assert (run() == baseline).all()


def test_a_transformer_of_another_kind_is_refused():
    model = diffusers.SD3Transformer2DModel(
        sample_size=16, patch_size=2, in_channels=4, num_layers=1, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=8, caption_projection_dim=16,
        pooled_projection_dim=8, out_channels=4,
    )  # fmt: skip
    with pytest.raises(ValueError, match="SD3Transformer2DModel has no self-attention"):
        apply_agentsd(model, recipe=AGENTS_THEN_KEYS)


def test_a_prior_has_no_image_to_merge_tokens_of():
    model = diffusers.PriorTransformer(
        num_attention_heads=2, attention_head_dim=8, num_layers=1, embedding_dim=16
    )
    with pytest.raises(ValueError, match="PriorTransformer has no self-attention that agentsd could patch"):
        apply_agentsd(model, recipe=AGENTS_THEN_KEYS)
