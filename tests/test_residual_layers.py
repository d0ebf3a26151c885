"""Which layers share residuals beside step caching: at interval 1 those alone that a cached step computes."""

import pytest
import torch
from callers import Caller, Guided, equal, outputs
from tiny import make_sdxl_unet, make_unet

from agentsd import Agents, Downsample, Phases, Recipe, ResidualSharing, StepCache, apply_agentsd
from agentsd.attention.agents import AgentsPlan
from agentsd.attention.downsample import DownsamplePlan

STEPS = StepCache(2, warmup_steps=4)
LAST = "up_blocks.2.attentions.1.transformer_blocks.0.attn1"
OPERATORS = {"downsample": Downsample(), "agents": Phases(Agents(stride=2), Downsample())}


def run(recipe, unet=None, caller=None):
    """What the U-Net gives in each call of a run, and the handle."""
    unet, caller = unet or make_unet(), caller or Caller(steps=12)
    handle = apply_agentsd(unet, recipe=recipe)
    return outputs(unet, caller), handle


@pytest.fixture
def attended(monkeypatch):
    """The layers that an operator was run in."""
    seen = set()
    for plan in (DownsamplePlan, AgentsPlan):
        attend = plan.attend

        def note(self, attn, *args, attend=attend):
            seen.add(attn.processor.name)
            return attend(self, attn, *args)

        monkeypatch.setattr(plan, "attend", note)
    return seen


@pytest.mark.parametrize("operator", OPERATORS)
def test_layers_that_cached_steps_skip_run_no_operator(operator, attended):
    outs, handle = run(Recipe(OPERATORS[operator], steps=STEPS, residual=ResidualSharing(1)))
    assert attended == {LAST}
    assert len(handle.layer_names) > 1
    assert "with a shared residual" in handle.summary()
    caching, _ = run(Recipe(steps=STEPS))
    changed = [not torch.equal(out, other) for out, other in zip(outs, caching, strict=True)]
    assert changed[4]  # the first cached step
    assert not any(changed[:4])


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(Downsample(), steps=STEPS, residual=ResidualSharing(2)),
        Recipe(Downsample(), residual=ResidualSharing(2)),
    ],
)
def test_where_computed_steps_share_all_layers_do(recipe, attended):
    _, handle = run(recipe, caller=Guided(steps=12))
    assert attended == set(handle.layer_names)


def test_what_nothing_reads_changes_nothing():
    recipe = Recipe(Downsample(), steps=STEPS, residual=ResidualSharing(1))
    handle = apply_agentsd(unet := make_unet(), recipe=recipe)
    handle._layers._cached_alone = lambda latent: False  # all layers keep residuals
    assert equal(outputs(unet, Caller(steps=12)), run(recipe)[0])


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_last_block_without_attention_leaves_step_caching_alone(operator, attended):
    """As in SDXL."""
    recipe = Recipe(OPERATORS[operator], steps=STEPS, residual=ResidualSharing(1))
    outs, handle = run(recipe, make_sdxl_unet())
    expected, other = run(Recipe(steps=STEPS), make_sdxl_unet())
    assert equal(outs, expected)
    assert not attended
    assert handle.summary() == other.summary()
