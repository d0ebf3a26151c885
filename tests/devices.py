"""Devices that are not at hand, played by the CPU."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

MISSING = {"_embedding_bag", "_embedding_bag_forward_only", "index_copy", "index_copy_", "segment_reduce"}
"""What Apple's MPS has not, or had not in torch 2.6, of what a merge of tokens may be made of."""


class LikeMPS(TorchDispatchMode):
    """A device without float64, pinned memory and some operators; all tensors in it are taken to be there."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in MISSING:
            raise NotImplementedError(f"The operator 'aten::{name}' is not implemented for the MPS device")
        if "pin_memory" in name:
            raise RuntimeError("there is no CUDA device to pin memory for")
        out = func(*args, **kwargs or {})
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float64:
                raise TypeError("the MPS framework doesn't support float64")
        return out


SUMS = {"bincount", "cumsum", "histc", "index_add", "index_put", "median", "nll_loss_forward", "put"}
SUMS |= {"scatter_add", "scatter_reduce"}
"""Forward operations that `torch.use_deterministic_algorithms` names as non-deterministic on CUDA."""
PLACES = {"scatter", "index_copy"}
"""Named there too; they are so where an index comes twice."""


class Asked(TorchDispatchMode):
    """Notes operations by name; one that sums in an order of its own on CUDA raises."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__.rstrip("_")
        self.names.add(name)
        assert name not in SUMS
        if name in PLACES:
            assert (args[2].sort(dim=-1).values.diff(dim=-1) > 0).all(), f"{name}: a place comes twice"
        return func(*args, **kwargs or {})
