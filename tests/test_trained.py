"""Trainable attention: starts where it should, trains, is saved and loaded, and leaves no trace."""

import copy

import accelerate
import pytest
import torch
from accelerate.hooks import remove_hook_from_module
from logs import silent, warned
from pipelines import load_lora
from random_state import untouched
from recipes import AGENTS_THEN_KEYS
from safetensors.torch import load_file, save_file
from tiny import call, make_controlnet, make_unet, snapshot

from agentsd import Phases, Recipe, apply_agentsd, remove_agentsd
from agentsd.apply import handle_of
from agentsd.modules import AgentModule, AttnZero, FocusedLinear

TRAINED = Recipe(AgentModule())
FILE = "agentsd.safetensors"


def move(handle):
    """Let weights differ from the base model's, as training does."""
    rng = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in handle.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=rng))


@pytest.fixture
def folder(tmp_path):
    handle = apply_agentsd(make_unet(), recipe=TRAINED)
    move(handle)
    handle.save(tmp_path)
    return tmp_path


@pytest.mark.parametrize("operator", [AgentModule(), FocusedLinear(), AttnZero()], ids=lambda one: one.name)
def test_applied_removed_trained_and_loaded(tmp_path, operator):
    """It starts the same each time, comes back from its file, and goes away to the bit.

    And the user's random state is not touched.
    """
    unet = make_unet()
    before, weights, baseline = snapshot(unet), copy.deepcopy(unet.state_dict()), call(unet)
    outputs = []
    with untouched():
        for _ in range(2):
            with apply_agentsd(unet, recipe=Recipe(Phases(operator, None))):
                outputs.append(call(unet))
        assert torch.equal(*outputs)
        assert not torch.equal(outputs[0], baseline)
        assert snapshot(unet) == before
        torch.testing.assert_close(unet.state_dict(), weights, rtol=0, atol=0)
        handle = apply_agentsd(unet, recipe=Recipe(operator))
        assert len(handle.parameters()) >= 4 * len(handle.layer_names)
        move(handle)
        trained = call(unet)
        handle.save(tmp_path)
        handle.remove()
        unet.load_state_dict(weights)  # training had changed the projections
        with apply_agentsd(unet, recipe=tmp_path) as handle:
            assert handle.recipe == Recipe(operator)
            assert torch.equal(call(unet), trained)
    torch.testing.assert_close(unet.state_dict(), weights, rtol=0, atol=0)
    assert torch.equal(call(unet), baseline)


def test_gradients_reach_every_weight_also_at_another_size():
    unet = make_unet()
    handle = apply_agentsd(unet, recipe=TRAINED)
    rng = torch.Generator().manual_seed(0)
    latent, text = torch.randn(2, 4, 24, 16, generator=rng), torch.randn(2, 7, 16, generator=rng)
    unet(latent, torch.tensor(999), text).sample.square().mean().backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in handle.parameters())


def test_an_untrained_module_is_told():
    with warned("agent_module is untrained"):
        apply_agentsd(make_unet(), recipe=TRAINED)
    with silent():
        apply_agentsd(make_unet().train(), recipe=TRAINED)  # it is to be trained


def test_a_trained_module_needs_the_models_size():
    before = snapshot(model := make_controlnet())
    with pytest.raises(ValueError, match=r"sample_size=None: \w+ does not say its size.*register_to_config"):
        apply_agentsd(model, recipe=TRAINED)
    assert snapshot(model) == before
    model.register_to_config(sample_size=16)  # the way out
    assert len(apply_agentsd(model, recipe=TRAINED).parameters()) > 2


def test_a_trained_module_is_refused_where_weights_are_elsewhere():
    accelerate.cpu_offload(unet := make_unet())
    before = snapshot(unet)
    with pytest.raises(ValueError, match=r"device 'meta'.*before pipe.enable_sequential_cpu_offload\(\)"):
        apply_agentsd(unet, recipe=TRAINED)
    assert snapshot(unet) == before


def spoil(change):
    """Change the weights of a file, given with the name of the first."""

    def work(folder):
        weights = load_file(folder / FILE)
        save_file(change(weights, sorted(weights)[0]), folder / FILE)

    return work


def shorten(folder):
    (folder / FILE).write_bytes((folder / FILE).read_bytes()[:100])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shorten, "cannot be read .*save it again"),
        (spoil(lambda w, n: w | {n: torch.full_like(w[n], torch.nan)}), "is not finite: save it again"),
        (spoil(lambda w, n: w | {n: w[n].int()}), "is torch.int32: save it again"),
        (spoil(lambda w, n: w | {n: w[n][:1].clone()}), "does not fit this model"),
        (spoil(lambda w, n: w | {"more": w[n].clone()}), "does not fit this model"),
        (lambda folder: Recipe(FocusedLinear()).save(folder), "the recipe beside it: .* differs"),
        (lambda folder: (folder / FILE).unlink(), r"holds no agentsd.safetensors: AgentSDHandle.save"),
    ],
)
def test_weights_that_cannot_be_used_leave_the_patch_in_force(folder, change, message):
    unet = make_unet()
    weights, handle = copy.deepcopy(unet.state_dict()), apply_agentsd(unet, recipe=AGENTS_THEN_KEYS)
    patched = call(unet)
    change(folder)
    for path in (folder, folder / "agentsd.json"):
        with pytest.raises(ValueError, match=message):
            apply_agentsd(unet, recipe=path)
    assert handle_of(unet) is handle
    assert torch.equal(call(unet), patched)
    torch.testing.assert_close(unet.state_dict(), weights, rtol=0, atol=0)


STEPS = {
    "apply": lambda p, folder: apply_agentsd(p, recipe=folder),
    "load": lambda p, folder: load_lora(p),
    "fuse": lambda p, folder: p.fuse_lora(),
    "remove": lambda p, folder: remove_agentsd(p),
    "unfuse": lambda p, folder: p.unfuse_lora(),
    "unload": lambda p, folder: p.unload_lora_weights(),
}


@pytest.mark.parametrize(
    "order", ["apply load fuse remove unfuse unload", "load fuse apply unfuse remove unload"]
)
def test_a_lora_and_loaded_weights_leave_the_base_weights(pipe, folder, order):
    base, baseline = copy.deepcopy(pipe.unet.state_dict()), call(pipe.unet)
    for step in order.split():
        STEPS[step](pipe, folder)
    torch.testing.assert_close(pipe.unet.state_dict(), base, rtol=0, atol=1e-6)
    torch.testing.assert_close(call(pipe.unet), baseline, rtol=0, atol=1e-5)


def test_loaded_weights_and_offloading(folder, tmp_path):
    """They are taken out, trained and saved once offloading ends, and not switched off beside it."""
    unet = make_unet()
    baseline = call(unet)
    handle = apply_agentsd(unet, recipe=folder)
    expected = call(unet)
    accelerate.cpu_offload(unet)
    trained, before = call(unet), snapshot(unet)
    assert torch.equal(trained, expected)
    for refused in (handle.remove, lambda: handle.save(tmp_path / "more"), handle.parameters):
        with pytest.raises(ValueError, match=r"call pipe.remove_all_hooks\(\) first"):
            refused()
    with pytest.raises(ValueError, match=r"enabled=False: .*call handle.remove\(\) instead"):
        handle.enabled = False
    assert snapshot(unet) == before
    assert torch.equal(call(unet), trained)
    remove_hook_from_module(unet, recurse=True)
    remove_agentsd(unet)
    assert torch.equal(call(unet), baseline)


def test_weights_are_loaded_for_another_number_of_agents(tmp_path):
    """By the recipe beside them, in which the count is changed."""
    handle = apply_agentsd(make_unet().train(), recipe=Recipe(AgentModule(count=9)))
    for name, parameter in handle._layers.processors[0].module.named_parameters():
        if "_bias" in name:
            torch.nn.init.constant_(parameter, 0.25)
    handle.save(tmp_path)
    Recipe(AgentModule(count=25)).save(tmp_path)
    with silent():
        other = apply_agentsd(make_unet(), recipe=tmp_path / "agentsd.json")
    row = other._layers.processors[0].module.gather_bias.row
    assert row.shape[1] == 25
    assert torch.equal(row, torch.full_like(row, 0.25))
