"""Trainable attention on a pipeline: starts where it should, trains, is saved, and leaves no trace."""

import pytest
import torch
from peft import LoraConfig
from tiny import call, make_unet, snapshot

from agentsd import Phases, PooledAgents, Recipe, apply_agentsd
from agentsd.modules import AgentModule, AttnZero, FocusedLinear

TRAINED = [AgentModule(), FocusedLinear(), AttnZero()]


def everything(unet):
    """All weights, copied."""
    return {name: weight.clone() for name, weight in unet.state_dict().items()}


def same(ours, theirs):
    """Whether two states are equal bit for bit."""
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_module_starts_as_pooled_agents():
    unet = make_unet()
    baseline = call(unet)
    with apply_agentsd(unet, recipe=Recipe(AgentModule())):
        trained = call(unet)
    assert (trained - baseline).abs().max() > 1e-3
    pooled = PooledAgents(k=0.075, scale=-0.15)
    for same_start in (pooled, AgentModule(bias=False), AgentModule(convolution=False)):
        with apply_agentsd(unet, recipe=Recipe(same_start)):
            torch.testing.assert_close(trained, call(unet), rtol=0, atol=1e-5)


@pytest.mark.parametrize("operator", TRAINED, ids=lambda operator: operator.name)
def test_applied_and_removed(pipe, sample, operator):
    before, weights, image = snapshot(pipe.unet), everything(pipe.unet), sample(pipe)
    state = torch.get_rng_state()
    with apply_agentsd(pipe, recipe=Recipe(Phases(operator, None))):
        applied = sample(pipe)
    assert torch.equal(torch.get_rng_state(), state)
    with apply_agentsd(pipe, recipe=Recipe(Phases(operator, None))) as handle:
        assert torch.equal(sample(pipe), applied)  # starts the same each time
        assert not torch.equal(sample(pipe), image)
        assert len(handle.parameters()) >= 4 * len(handle.layer_names)
    assert snapshot(pipe.unet) == before
    assert same(everything(pipe.unet), weights)
    assert torch.equal(sample(pipe), image)


@pytest.mark.parametrize("operator", TRAINED, ids=lambda operator: operator.name)
def test_trained_weights_come_back_and_go_away(pipe, sample, tmp_path, operator):
    baseline, weights = sample(pipe), everything(pipe.unet)
    handle = apply_agentsd(pipe, recipe=Recipe(operator))
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in handle.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=rng))
    trained = sample(pipe)
    handle.save(tmp_path)
    handle.remove()
    pipe.unet.load_state_dict(weights)  # training had changed the projections
    with apply_agentsd(pipe, recipe=tmp_path) as handle:
        assert handle.recipe == Recipe(operator)
        assert torch.equal(sample(pipe), trained)
    assert same(everything(pipe.unet), weights)
    assert torch.equal(sample(pipe), baseline)


def test_gradients_reach_every_weight():
    unet = make_unet()
    handle = apply_agentsd(unet, recipe=Recipe(AgentModule()))
    latent = torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(0))
    text = torch.randn(2, 7, unet.config.cross_attention_dim, generator=torch.Generator().manual_seed(1))
    unet(latent, torch.tensor(999), text).sample.square().mean().backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in handle.parameters())


def test_a_module_of_another_size_runs(pipe):
    unet = pipe.unet
    with apply_agentsd(unet, recipe=Recipe(AgentModule())):
        assert call(unet, size=(24, 16)).shape == (2, 4, 24, 16)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("other operator", "does not fit this model and the recipe beside it: .* differs"),
        ("other model", "does not fit this model and the recipe beside it: .* differs"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(pipe, tmp_path, damage, message):
    with apply_agentsd(pipe, recipe=Recipe(AgentModule())) as handle:
        handle.save(tmp_path)
    if damage == "other operator":
        Recipe(FocusedLinear()).save(tmp_path)
    unet = make_unet(block_out_channels=(64, 64, 64)) if damage == "other model" else pipe.unet
    before, weights = snapshot(unet), everything(unet)
    with pytest.raises(ValueError, match=rf"agentsd\.safetensors.*{message}"):
        apply_agentsd(unet, recipe=tmp_path)
    assert snapshot(unet) == before
    assert same(everything(unet), weights)


def test_a_lora_that_is_fused_meanwhile_stays(tmp_path):
    """What `fuse_lora` adds is the user's: it stays when the trained weights go."""
    unet = make_unet()
    with apply_agentsd(unet, recipe=Recipe(FocusedLinear())) as handle, torch.no_grad():
        for weight in handle.parameters():
            weight.mul_(1.5)
        handle.save(tmp_path)
    unet, twin = make_unet(), make_unet()
    for each in (unet, twin):
        torch.manual_seed(0)
        config = LoraConfig(r=2, target_modules=["to_q", "to_out.0"], init_lora_weights=False)
        each.add_adapter(config, adapter_name="style")
    with apply_agentsd(unet, recipe=tmp_path):
        unet.fuse_lora()
    twin.fuse_lora()
    for name, weight in twin.state_dict().items():
        torch.testing.assert_close(unet.state_dict()[name], weight, rtol=0, atol=1e-6)


def test_settings_of_a_module_are_checked():
    with pytest.raises(TypeError, match="bias='biases' is a str: pass a bool"):
        AgentModule(bias="biases")
    with pytest.raises(ValueError, match="count=0: pass 1 or more, or None"):
        AgentModule(count=0)
    with pytest.raises(ValueError, match=r"attention=.*: a layer has one trained module: name one"):
        Recipe(Phases(AgentModule(), FocusedLinear()))


def test_a_module_is_made_for_a_size_and_on_a_machine_that_are_known():
    with pytest.raises(ValueError, match="sample_size=None: UNet2DConditionModel does not say its size"):
        apply_agentsd(make_unet(sample_size=None), recipe=Recipe(AgentModule()))
    with pytest.raises(ValueError, match=r"'meta'.*before pipe\.enable_sequential_cpu_offload"):
        apply_agentsd(make_unet().to("meta"), recipe=Recipe(AgentModule()))
