"""Peak memory of SD 1.5's U-Net, counted from the storages alive: nothing is computed (fake tensors)."""

import weakref

import pytest
import torch
from diffusers import UNet2DConditionModel
from recipes import AGENTS_THEN_KEYS
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from agentsd import apply_agentsd
from agentsd.attention import downsample, matching, ranking
from agentsd.recipe import AGENTSD


class Peak(TorchDispatchMode):
    """The most bytes of tensors, beside the weights, that are alive at once."""

    def __init__(self, model):
        super().__init__()
        self.now = self.bytes = 0
        self._alive = {parameter.untyped_storage()._cdata for parameter in model.parameters()}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._alive:
                    self._alive.add(storage._cdata)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        self.bytes = max(self.bytes, self.now)
        return out

    def _free(self, key, size):
        self._alive.discard(key)
        self.now -= size


@pytest.fixture
def fake(monkeypatch):
    """Fake tensors, but for the cells: how many sources there are is read from them."""
    mode = FakeTensorMode()
    draw, split = matching.sample_destinations, matching.split_grid

    def real_draw(*args):
        with unset_fake_temporarily():
            return draw(*args)

    def real_split(*args):
        with unset_fake_temporarily():
            partition = split(*args)
        return partition._replace(positions=mode.from_tensor(partition.positions))

    for module in (ranking, downsample):
        monkeypatch.setattr(module, "sample_destinations", real_draw)
        monkeypatch.setattr(module, "split_grid", real_split)
    downsample._first_of_cells.cache_clear()  # of what is real
    with mode, torch.no_grad():
        yield
    downsample._first_of_cells.cache_clear()


def peak(unet, side, t):
    latents, embeds = torch.randn(2, 4, side, side), torch.randn(2, 77, 768)
    with Peak(unet) as mode:
        unet(latents, t, encoder_hidden_states=embeds)
    return mode.bytes


@pytest.mark.usefixtures("fake")
def test_the_patch_takes_no_more_memory_than_baseline(monkeypatch):
    """But for the indices of what is merged, about a thousandth; at 2048 px."""
    unet = UNet2DConditionModel(sample_size=64, cross_attention_dim=768, attention_head_dim=8).eval()
    baseline = peak(unet, side := 256, 999)
    for recipe in (AGENTSD, AGENTS_THEN_KEYS):
        with apply_agentsd(unet, recipe=recipe):
            assert peak(unet, side, 999) < 1.0015 * baseline
            assert peak(unet, side, 1) < 1.0015 * baseline
    # The score matrix as a whole would be larger than everything else.
    monkeypatch.setattr(matching, "SCORE_BUDGET", 2**60)
    with apply_agentsd(unet, mode="agentsd"):
        assert peak(unet, side, 1) > 1.5 * baseline
