"""Which bits a CUDA device repeats: no operation that sums in an order of its own is asked for in a run."""

from collections import Counter
from typing import Any

import pytest
import torch
from callers import Guided
from tiny import call, make_unet
from torch.utils._python_dispatch import TorchDispatchMode

from agentsd import Agents, Merge, PooledAgents, Recipe, ResidualSharing, StepCache
from agentsd import apply_agentsd as patch

SUMS = {"bincount", "cumsum", "histc", "index_add", "index_put", "median", "nll_loss_forward", "put"}
SUMS |= {"scatter_add", "scatter_reduce"}
"""Forward operations that `torch.use_deterministic_algorithms` names as non-deterministic on CUDA."""
PLACES = {"scatter", "index_copy"}
"""Named there too; they are so where an index comes twice."""


class Asked(TorchDispatchMode):
    """Counts operations by name; a copy to places of which one comes twice raises."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.rstrip("_")
        self.counts[name] += 1
        if name in PLACES:
            assert (args[2].sort(dim=-1).values.diff(dim=-1) > 0).all(), f"{name}: a place comes twice"
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("operator", [Agents(), PooledAgents(9, ratio=0.4)])
def test_no_operator_sums_in_an_order_of_its_own(operator):
    unet = make_unet()
    patch(unet, recipe=Recipe(operator))
    with Asked() as asked:
        call(unet)
    assert not SUMS & set(asked.counts)
    assert PLACES & set(asked.counts)


def test_no_cache_sums_in_an_order_of_its_own():
    unet, caller = make_unet(), Guided(9)
    recipe = Recipe(Merge(), residual=ResidualSharing(2), steps=StepCache(2))
    with patch(caller.pipe(unet), recipe=recipe) as handle, Asked() as asked:
        for i in range(9):
            caller(unet, i)
    assert "corrected" in handle.summary()
    assert "shared" in handle.summary()
    assert not SUMS & set(asked.counts)


def test_such_operations_would_be_noticed():
    with Asked() as asked:
        torch.zeros(3).index_add_(0, torch.tensor([1, 1]), torch.ones(2))
    assert SUMS & set(asked.counts)
    with pytest.raises(AssertionError, match="comes twice"), Asked():
        torch.zeros(3).scatter_(0, torch.tensor([1, 1]), torch.ones(2))
