"""Trainable attention on a pipeline: starts where it should, trains, is saved, and leaves no trace."""

import pytest
import torch
from test_patch import call, snapshot
from tiny import make_unet

from agentsd import AgentConfig, apply_agentsd

TRAINED = ["module", "focused", "attnzero"]


def everything(unet):
    """All weights, copied."""
    return {name: weight.clone() for name, weight in unet.state_dict().items()}


def same(ours, theirs):
    """Whether two states are equal bit for bit."""
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_module_starts_as_pooled_agents():
    unet = make_unet()
    with apply_agentsd(unet, attention="module", early_frac=1.0, ratio=0.4):
        trained = call(unet)
    with apply_agentsd(unet, agents="pool", ratio=0.0, early_frac=1.0):
        torch.testing.assert_close(trained, call(unet), rtol=0, atol=1e-5)
    with apply_agentsd(unet, attention="module", parts=("convolution",), early_frac=1.0):
        torch.testing.assert_close(trained, call(unet), rtol=0, atol=1e-5)


@pytest.mark.parametrize("attention", TRAINED)
def test_applied_and_removed(pipe, sample, attention):
    before, weights, picture = snapshot(pipe.unet), everything(pipe.unet), sample(pipe)
    state = torch.get_rng_state()
    with apply_agentsd(pipe, attention=attention, late="none"):
        applied = sample(pipe)
    assert torch.equal(torch.get_rng_state(), state)
    with apply_agentsd(pipe, attention=attention, late="none") as handle:
        assert torch.equal(sample(pipe), applied)  # starts the same each time
        assert not torch.equal(sample(pipe), picture)
        assert len(handle.parameters()) >= 4 * len(handle.layer_names)
    assert snapshot(pipe.unet) == before
    assert same(everything(pipe.unet), weights)
    assert torch.equal(sample(pipe), picture)


@pytest.mark.parametrize("attention", TRAINED)
def test_trained_weights_come_back_and_go_away(pipe, sample, tmp_path, attention):
    stock, weights = sample(pipe), everything(pipe.unet)
    handle = apply_agentsd(pipe, attention=attention, early_frac=1.0)
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in handle.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=rng))
    trained = sample(pipe)
    handle.save(tmp_path)
    handle.remove()
    pipe.unet.load_state_dict(weights)  # training had changed the projections
    with apply_agentsd(pipe, config=tmp_path) as handle:
        assert handle.config == AgentConfig(attention=attention, early_frac=1.0)
        assert torch.equal(sample(pipe), trained)
    assert same(everything(pipe.unet), weights)
    assert torch.equal(sample(pipe), stock)


def test_gradients_reach_every_weight():
    unet = make_unet()
    handle = apply_agentsd(unet, attention="module", early_frac=1.0)
    latent = torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(0))
    text = torch.randn(2, 7, unet.config.cross_attention_dim, generator=torch.Generator().manual_seed(1))
    unet(latent, torch.tensor(999), text).sample.square().mean().backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in handle.parameters())


def test_a_module_of_another_size_runs(pipe):
    unet = pipe.unet
    with apply_agentsd(unet, attention="module", early_frac=1.0):
        assert call(unet, size=(24, 16)).shape == (2, 4, 24, 16)


@pytest.mark.parametrize("damage", ["cut", "other settings", "other model"])
def test_weights_that_do_not_fit_change_nothing(pipe, tmp_path, damage):
    with apply_agentsd(pipe, attention="module") as handle:
        handle.save(tmp_path)
    if damage == "cut":
        path = tmp_path / "agentsd.safetensors"
        path.write_bytes(path.read_bytes()[:100])
    elif damage == "other settings":
        AgentConfig(attention="focused").save(tmp_path)
    unet = make_unet(block_out_channels=(64, 64, 64)) if damage == "other model" else pipe.unet
    before, weights = snapshot(unet), everything(unet)
    with pytest.raises(ValueError, match=r"agentsd.safetensors (cannot be read|does not fit)"):
        apply_agentsd(unet, config=tmp_path)
    assert snapshot(unet) == before
    assert same(everything(unet), weights)


def test_settings_by_layer_have_a_file_of_their_own(pipe, tmp_path):
    from agentsd import LayerConfigs

    name = apply_agentsd(pipe).layer_names[0]
    with (
        apply_agentsd(pipe, config=LayerConfigs({name: AgentConfig()})) as handle,
        pytest.raises(ValueError, match=r"LayerConfigs\.save"),
    ):
        handle.save(tmp_path)


def test_wrong_parts_are_named():
    with pytest.raises(ValueError, match=r"parts=\('biases',\): leave out 'bias' or 'convolution'"):
        AgentConfig(attention="module", parts=("biases",))
