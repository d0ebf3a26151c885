"""Trainable attention: starts where it should, trains, is saved and loaded, and leaves no trace."""

import os

import accelerate
import pytest
import torch
from accelerate.hooks import remove_hook_from_module
from logs import logged, silent, warned
from pipelines import load_lora
from recipes import AGENTS_THEN_KEYS
from safetensors.torch import load_file, save_file
from tiny import call, make_controlnet, make_unet, snapshot

from agentsd import Agents, Phases, PooledAgents, Recipe, apply_agentsd, remove_agentsd
from agentsd.apply import handle_of
from agentsd.modules import AgentModule, AttnZero, FocusedLinear

MODULES = [AgentModule(), FocusedLinear(), AttnZero()]
TRAINED = Recipe(AgentModule())
CPU = torch.device("cpu")


def everything(unet):
    """All weights, copied."""
    return {name: weight.clone() for name, weight in unet.state_dict().items()}


def same(ours, theirs):
    """Whether two states are equal bit for bit."""
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def move(handle):
    """Let weights differ from the base model's, as training does."""
    rng = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in handle.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=rng))


@pytest.fixture
def folder(tmp_path):
    """A recipe with trained weights."""
    handle = apply_agentsd(make_unet(), recipe=TRAINED)
    move(handle)
    handle.save(tmp_path)
    return tmp_path


def test_the_module_starts_as_pooled_agents():
    unet = make_unet()
    baseline = call(unet)
    with apply_agentsd(unet, recipe=TRAINED):
        trained = call(unet)
    assert (trained - baseline).abs().max() > 1e-3
    pooled = PooledAgents(k=0.075, scale=-0.15)
    for same_start in (pooled, AgentModule(bias=False), AgentModule(convolution=False)):
        with apply_agentsd(unet, recipe=Recipe(same_start)):
            torch.testing.assert_close(trained, call(unet), rtol=0, atol=1e-5)


@pytest.mark.parametrize("operator", MODULES, ids=lambda operator: operator.name)
def test_applied_removed_trained_and_loaded(tmp_path, operator):
    """It starts the same each time, comes back from its file, and goes away to the bit."""
    unet = make_unet()
    before, weights, baseline = snapshot(unet), everything(unet), call(unet)
    outputs = []
    for _ in range(2):
        with apply_agentsd(unet, recipe=Recipe(Phases(operator, None))):
            outputs.append(call(unet))
    assert torch.equal(*outputs)
    assert not torch.equal(outputs[0], baseline)
    assert snapshot(unet) == before
    assert same(everything(unet), weights)
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
    assert same(everything(unet), weights)
    assert torch.equal(call(unet), baseline)


def test_gradients_reach_every_weight_also_at_another_size():
    unet = make_unet()
    handle = apply_agentsd(unet, recipe=TRAINED)
    rng = torch.Generator().manual_seed(0)
    latent, text = torch.randn(2, 4, 24, 16, generator=rng), torch.randn(2, 7, 16, generator=rng)
    unet(latent, torch.tensor(999), text).sample.square().mean().backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in handle.parameters())


@pytest.mark.parametrize("operator", MODULES, ids=lambda operator: operator.name)
def test_an_untrained_module_is_told(operator):
    with warned(f"{operator.name} is untrained"):
        apply_agentsd(make_unet(), recipe=Recipe(operator))
    with silent():
        apply_agentsd(make_unet().train(), recipe=Recipe(operator))  # it is to be trained


@pytest.mark.parametrize("make", [make_controlnet, lambda: make_unet(sample_size=None)])
def test_a_trained_module_needs_the_models_size(make):
    model = make()
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"sample_size=None: \w+ does not say its size.*register_to_config"):
        apply_agentsd(model, recipe=TRAINED)
    assert snapshot(model) == before
    assert len(apply_agentsd(model, recipe=AGENTS_THEN_KEYS).layer_names) >= 2
    with pytest.raises(ValueError, match="sample_size=None"):
        apply_agentsd(model, recipe=TRAINED)
    assert handle_of(model).recipe == AGENTS_THEN_KEYS  # the patch that was there
    model.register_to_config(sample_size=16)  # the way out
    assert len(apply_agentsd(model, recipe=TRAINED).parameters()) > 2


@pytest.mark.parametrize(
    ("operator", "storage"), [(AgentModule(), torch.float8_e4m3fn), (FocusedLinear(), torch.bfloat16)]
)
def test_a_trained_module_has_the_dtype_of_computing_under_layerwise_casting(operator, storage):
    unet = make_unet()
    unet.enable_layerwise_casting(storage_dtype=storage, compute_dtype=torch.float32)
    handle = apply_agentsd(unet, recipe=Recipe(operator))
    assert {p.dtype for module in handle._layers.modules for p in module.parameters()} == {torch.float32}
    assert call(unet).isfinite().all()


def test_a_trained_module_is_refused_where_weights_are_elsewhere():
    first, later = make_unet(), make_unet()
    apply_agentsd(first, recipe=TRAINED)
    expected = call(first)
    accelerate.cpu_offload(first, execution_device=CPU)  # the way out
    assert torch.equal(call(first), expected)
    accelerate.cpu_offload(later, execution_device=CPU)
    before = snapshot(later)
    with pytest.raises(ValueError, match=r"device 'meta'.*before pipe.enable_sequential_cpu_offload\(\)"):
        apply_agentsd(later, recipe=TRAINED)
    assert snapshot(later) == before


def _spoil(change):
    def spoil(path):
        weights = load_file(path)
        save_file(change(weights, sorted(weights)[0]), path)

    return spoil


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:100]), "cannot be read .*save it again"),
        (lambda path: path.write_bytes(b""), "cannot be read .*save it again"),
        (_spoil(lambda w, n: w | {n: torch.full_like(w[n], torch.nan)}), "is not finite: save it again"),
        (_spoil(lambda w, n: w | {n: w[n] / 0}), "is not finite: save it again"),
        (_spoil(lambda w, n: w | {n: w[n].int()}), "is torch.int32: save it again"),
        (_spoil(lambda w, n: w | {n: w[n][:1].clone()}), "does not fit this model"),
        (_spoil(lambda w, n: {k: v for k, v in w.items() if k != n}), "does not fit this model"),
        (_spoil(lambda w, n: w | {"more": w[n].clone()}), "does not fit this model"),
        (lambda path: Recipe(FocusedLinear()).save(path.parent), "the recipe beside it: .* differs"),
    ],
)
def test_weights_that_cannot_be_used_leave_the_patch_in_force(folder, spoil, message):
    unet = make_unet()
    weights, handle = everything(unet), apply_agentsd(unet, recipe=AGENTS_THEN_KEYS)
    patched = call(unet)
    spoil(folder / "agentsd.safetensors")
    with pytest.raises(ValueError, match=message):
        apply_agentsd(unet, recipe=folder)
    assert handle_of(unet) is handle
    assert torch.equal(call(unet), patched)
    assert same(everything(unet), weights)


def test_weights_of_another_model_change_nothing(folder):
    unet = make_unet(block_out_channels=(64, 64, 64))
    before, weights = snapshot(unet), everything(unet)
    with pytest.raises(ValueError, match=r"agentsd\.safetensors.*the recipe beside it: .* differs"):
        apply_agentsd(unet, recipe=folder)
    assert snapshot(unet) == before
    assert same(everything(unet), weights)


STEPS = {
    "apply": lambda p, folder: apply_agentsd(p, recipe=folder),
    "load": lambda p, folder: load_lora(p),
    "fuse": lambda p, folder: p.fuse_lora(),
    "remove": lambda p, folder: remove_agentsd(p),
    "unfuse": lambda p, folder: p.unfuse_lora(),
    "unload": lambda p, folder: p.unload_lora_weights(),
}


@pytest.mark.parametrize(
    "order",
    [
        "apply load fuse remove unfuse unload",
        "load apply fuse remove unfuse unload",
        "load apply fuse unfuse remove unload",
        "load fuse apply remove unfuse unload",
        "load fuse apply unfuse remove unload",
    ],
)
def test_a_lora_and_loaded_weights_leave_the_base_weights(pipe, folder, order):
    base, baseline = everything(pipe.unet), call(pipe.unet)
    for step in order.split():
        STEPS[step](pipe, folder)
    torch.testing.assert_close(pipe.unet.state_dict(), base, rtol=0, atol=1e-6)
    torch.testing.assert_close(call(pipe.unet), baseline, rtol=0, atol=1e-5)


def test_a_lora_that_is_fused_meanwhile_stays(pipe, make_pipeline, folder):
    """What `fuse_lora` adds is the user's: it stays when the trained weights go."""
    twin = make_pipeline()
    apply_agentsd(pipe, recipe=folder)
    for each in (twin, pipe):
        load_lora(each)
        each.fuse_lora()
    remove_agentsd(pipe)
    torch.testing.assert_close(pipe.unet.state_dict(), twin.unet.state_dict(), rtol=0, atol=1e-6)


def test_a_block_inside_another_puts_trained_weights_back(folder):
    unet = make_unet()
    baseline = call(unet)
    with apply_agentsd(unet, recipe=folder):
        trained = call(unet)
        with apply_agentsd(unet, recipe=AGENTS_THEN_KEYS):
            assert not torch.equal(call(unet), trained)
        assert torch.equal(call(unet), trained)
    assert torch.equal(call(unet), baseline)


def test_trained_weights_are_refused_where_the_model_is_offloaded(tmp_path):
    with apply_agentsd(make_unet(), recipe=Recipe(Agents())) as trained:
        trained.save(tmp_path)  # projections alone
    accelerate.cpu_offload(unet := make_unet())
    before = snapshot(unet)
    with pytest.raises(ValueError, match=r"on the device 'meta'.*call pipe.remove_all_hooks\(\) first"):
        apply_agentsd(unet, recipe=tmp_path)
    assert snapshot(unet) == before
    handle = apply_agentsd(unet, recipe=Recipe(Agents()))
    for ask in (handle.parameters, lambda: handle.save(tmp_path / "more")):
        with pytest.raises(ValueError, match=r"call pipe.remove_all_hooks\(\) first"):
            ask()


def test_loaded_weights_are_taken_out_once_offloading_ends(folder):
    unet = make_unet()
    baseline = call(unet)
    apply_agentsd(unet, recipe=folder)
    accelerate.cpu_offload(unet)
    trained = call(unet)
    with pytest.raises(ValueError, match=r"call pipe.remove_all_hooks\(\) first"):
        remove_agentsd(unet)
    assert torch.equal(call(unet), trained)
    remove_hook_from_module(unet, recurse=True)
    remove_agentsd(unet)
    assert torch.equal(call(unet), baseline)


def test_weights_beside_a_recipes_file_are_loaded(folder):
    unet, twin = make_unet(), make_unet()
    apply_agentsd(unet, recipe=folder)
    apply_agentsd(twin, recipe=str(folder / "agentsd.json"))
    assert torch.equal(call(unet), call(twin))
    (folder / "agentsd.safetensors").unlink()
    for path in (folder, folder / "agentsd.json"):
        with pytest.raises(ValueError, match=r"holds no agentsd.safetensors: AgentSDHandle.save"):
            apply_agentsd(twin, recipe=path)
    assert torch.equal(call(unet), call(twin))


def test_a_file_of_weights_may_change_while_they_are_in_use(folder):
    unet = make_unet()
    baseline = call(unet)
    with apply_agentsd(unet, recipe=folder):
        trained = call(unet)
        os.truncate(folder / "agentsd.safetensors", 0)
        assert torch.equal(call(unet), trained)
    assert torch.equal(call(unet), baseline)


def test_weights_are_loaded_for_another_number_of_agents(tmp_path):
    """By the recipe beside them, in which the count is changed."""
    handle = apply_agentsd(make_unet().train(), recipe=Recipe(AgentModule(count=9)))
    for name, parameter in handle._layers.modules[0].named_parameters():
        if "_bias" in name:
            torch.nn.init.constant_(parameter, 0.25)
    handle.save(tmp_path)
    Recipe(AgentModule(count=25)).save(tmp_path)
    with logged() as messages:
        other = apply_agentsd(make_unet(), recipe=tmp_path)
    assert not messages
    row = other._layers.modules[0].gather_bias.row
    assert row.shape[1] == 25
    assert torch.equal(row, torch.full_like(row, 0.25))
