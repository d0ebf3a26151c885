"""The user's random state: not drawn from, and not set for a moment that another thread could see."""

import random
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import numpy as np
import torch

_SETTERS = [
    *((torch, name) for name in ("manual_seed", "seed", "set_rng_state")),
    *((torch.random, name) for name in ("manual_seed", "seed", "set_rng_state", "fork_rng")),
    *((torch.cuda, name) for name in ("manual_seed", "manual_seed_all", "seed", "seed_all")),
    *((torch.cuda, name) for name in ("set_rng_state", "set_rng_state_all")),
    *((torch.mps, name) for name in ("manual_seed", "seed", "set_rng_state")),
    *((torch.xpu, name) for name in ("manual_seed", "manual_seed_all", "set_rng_state")),
    *((np.random, name) for name in ("seed", "set_state")),
    *((random, name) for name in ("seed", "setstate")),
]


@contextmanager
def untouched():
    """Fail if anything in the block seeds, sets or draws from a global generator.

    Calls are noted, not refused: what is refused may be caught on its way (accelerate does).
    """
    called: list[str] = []

    def noted(place, name, original):
        def call(*args, **kwargs):
            called.append(f"{place.__name__}.{name}")
            return original(*args, **kwargs)

        return call

    before = _states()
    with ExitStack() as stack:
        for place, name in _SETTERS:
            stack.enter_context(patch.object(place, name, noted(place, name, getattr(place, name))))
        yield
    assert not called
    assert _states() == before


def _states():
    kind, keys, *rest = np.random.get_state()
    return bytes(torch.get_rng_state().numpy()), kind, keys.tobytes(), rest, random.getstate()
