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
