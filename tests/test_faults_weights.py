"""Faults that were found and mended, each a test that the old code fails.

Trained weights that are loaded from a folder.
"""

import os

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_module
from pipelines import load_lora
from recipes import AGENTS_THEN_KEYS
from safetensors.torch import load_file, save_file
from tiny import call, make_unet, snapshot

from agentsd import Agents, Recipe, apply_agentsd, remove_agentsd
from agentsd.modules import AgentModule

TRAINED = Recipe(AgentModule())


def _cut(path):
    path.write_bytes(path.read_bytes()[:100])


def _spoil(change):
    def spoil(path):
        weights = load_file(path)
        name = sorted(weights)[0]
        save_file(change(weights, name), path)

    return spoil


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_cut, "cannot be read .*save it again"),
        (lambda path: path.write_bytes(b""), "cannot be read .*save it again"),
        (_spoil(lambda w, n: w | {n: torch.full_like(w[n], torch.nan)}), "is not finite: save it again"),
        (_spoil(lambda w, n: w | {n: w[n] / 0}), "is not finite: save it again"),
        (_spoil(lambda w, n: w | {n: w[n].int()}), "is torch.int32: save it again"),
        (_spoil(lambda w, n: w | {n: w[n][:1].clone()}), "does not fit this model"),
        (_spoil(lambda w, n: {k: v for k, v in w.items() if k != n}), "does not fit this model"),
        (_spoil(lambda w, n: w | {"more": w[n].clone()}), "does not fit this model"),
    ],
)
def test_weights_that_cannot_be_used_leave_the_patch_in_force(pipe, sample, tmp_path, spoil, message):
    with apply_agentsd(pipe, recipe=TRAINED) as trained:
        trained.save(tmp_path)
    before = [p.clone() for p in pipe.unet.parameters()]
    handle = apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS)
    image = sample(pipe)
    spoil(tmp_path / "agentsd.safetensors")
    with pytest.raises(ValueError, match=message):
        apply_agentsd(pipe, recipe=tmp_path)
    assert pipe.unet._agentsd is handle
    assert torch.equal(sample(pipe), image)
    assert all(torch.equal(a, b) for a, b in zip(before, pipe.unet.parameters(), strict=True))


def trained_folder(tmp_path):
    """A recipe with weights that are not the base model's."""
    unet = make_unet()
    handle = apply_agentsd(unet, recipe=TRAINED)
    rng = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in handle.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=rng))
    handle.save(tmp_path)
    return tmp_path


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
def test_a_lora_and_loaded_weights_leave_the_base_weights(pipe, sample, tmp_path, order):
    folder = trained_folder(tmp_path)
    base, baseline = {k: v.clone() for k, v in pipe.unet.state_dict().items()}, sample(pipe)
    for step in order.split():
        STEPS[step](pipe, folder)
    after = pipe.unet.state_dict()
    assert after.keys() == base.keys()
    for name, weight in base.items():
        torch.testing.assert_close(after[name], weight, rtol=0, atol=1e-6)
    torch.testing.assert_close(sample(pipe), baseline, rtol=0, atol=1e-3)


def test_a_fused_lora_acts_after_the_removal(pipe, make_pipeline, sample, tmp_path):
    twin = make_pipeline()
    load_lora(twin)
    twin.fuse_lora()
    apply_agentsd(pipe, recipe=trained_folder(tmp_path))
    load_lora(pipe)
    pipe.fuse_lora()
    remove_agentsd(pipe)
    torch.testing.assert_close(sample(pipe), sample(twin), rtol=0, atol=1e-3)


def test_a_block_inside_another_puts_trained_weights_back(tmp_path):
    unet = make_unet()
    baseline = call(unet)
    with apply_agentsd(unet, recipe=trained_folder(tmp_path)):
        trained = call(unet)
        with apply_agentsd(unet, recipe=AGENTS_THEN_KEYS):
            assert not torch.equal(call(unet), trained)
        assert torch.equal(call(unet), trained)
    assert torch.equal(call(unet), baseline)


# D17: weights that sequential offloading keeps elsewhere


def test_trained_weights_are_refused_where_the_model_is_offloaded(sample, make_pipeline, tmp_path):
    with apply_agentsd(make_pipeline(), recipe=Recipe(Agents())) as trained:
        trained.save(tmp_path)  # projections alone
    pipe = make_pipeline()
    cpu_offload(pipe.unet)
    before = snapshot(pipe.unet)
    with pytest.raises(ValueError, match=r"on the device 'meta'.*call pipe.remove_all_hooks\(\) first"):
        apply_agentsd(pipe, recipe=tmp_path)
    assert snapshot(pipe.unet) == before
    handle = apply_agentsd(pipe, recipe=Recipe(Agents()))
    for ask in (handle.parameters, lambda: handle.save(tmp_path / "more")):
        with pytest.raises(ValueError, match=r"call pipe.remove_all_hooks\(\) first"):
            ask()


def test_loaded_weights_are_taken_out_once_offloading_ends(pipe, sample, tmp_path):
    baseline = sample(pipe)
    folder = trained_folder(tmp_path)
    apply_agentsd(pipe, recipe=folder)
    cpu_offload(pipe.unet)
    trained = sample(pipe)
    with pytest.raises(ValueError, match=r"call pipe.remove_all_hooks\(\) first"):
        remove_agentsd(pipe)
    assert torch.equal(sample(pipe), trained)
    remove_hook_from_module(pipe.unet, recurse=True)
    remove_agentsd(pipe)
    assert torch.equal(sample(pipe), baseline)


# D18: weights beside a recipe's file


def test_weights_beside_a_recipes_file_are_loaded(pipe, make_pipeline, sample, tmp_path):
    folder, twin = trained_folder(tmp_path), make_pipeline()
    apply_agentsd(pipe, recipe=folder)
    apply_agentsd(twin, recipe=str(folder / "agentsd.json"))
    assert torch.equal(sample(pipe), sample(twin))
    (folder / "agentsd.safetensors").unlink()
    for path in (folder, folder / "agentsd.json"):
        with pytest.raises(
            ValueError, match=r"trained, and .* holds no agentsd.safetensors: AgentSDHandle.save"
        ):
            apply_agentsd(twin, recipe=path)
    assert torch.equal(sample(pipe), sample(twin))


# D23: loaded weights are no longer the file's


def test_a_file_of_weights_may_change_while_they_are_in_use(pipe, sample, tmp_path):
    baseline, folder = sample(pipe), trained_folder(tmp_path)
    with apply_agentsd(pipe, recipe=folder):
        image = sample(pipe)
        os.truncate(folder / "agentsd.safetensors", 0)
        assert torch.equal(sample(pipe), image)
    assert torch.equal(sample(pipe), baseline)
