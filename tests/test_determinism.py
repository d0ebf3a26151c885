"""Which bits a CUDA device repeats: no operation that sums in an order of its own is asked for in a run."""

from collections import Counter

import pytest
from callers import Guided, outputs
from tiny import make_unet
from torch.utils._python_dispatch import TorchDispatchMode

from agentsd import Agents, Merge, PooledAgents, Recipe, ResidualSharing, StepCache, apply_agentsd

SUMS = {"bincount", "cumsum", "histc", "index_add", "index_put", "median", "nll_loss_forward", "put"}
SUMS |= {"scatter_add", "scatter_reduce"}
"""Forward operations that `torch.use_deterministic_algorithms` names as non-deterministic on CUDA."""
PLACES = {"scatter", "index_copy"}
"""Named there too; they are so where an index comes twice."""


class Asked(TorchDispatchMode):
    """Counts operations by name; a copy to places of which one comes twice raises."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__.rstrip("_")
        self.counts[name] += 1
        if name in PLACES:
            assert (args[2].sort(dim=-1).values.diff(dim=-1) > 0).all(), f"{name}: a place comes twice"
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(Agents()),
        Recipe(PooledAgents(9, ratio=0.4)),
        Recipe(Merge(), residual=ResidualSharing(2), steps=StepCache(2)),
    ],
)
def test_nothing_sums_in_an_order_of_its_own(recipe):
    unet, caller = make_unet(), Guided(9)
    with apply_agentsd(caller.pipe(unet), recipe=recipe) as handle, Asked() as asked:
        outputs(unet, caller)
    assert ("corrected" in handle.summary()) == ("shared" in handle.summary()) == bool(recipe.steps)
    assert not SUMS & set(asked.counts)
    assert PLACES & set(asked.counts)
