"""Counting what a call asks of the device."""

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

# Views, allocations and what is done on the host alone.
NO_LAUNCH = {"_unsafe_view", "detach", "empty", "set_", "promote_types", "randint"}


class Launches(TorchDispatchMode):
    """Counts operations that compute something, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and name not in NO_LAUNCH:
            self.counts[name] += 1
        return func(*args, **kwargs or {})
