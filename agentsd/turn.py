"""Whose turn it is: a U-Net handles one call at a time, and calls that come meanwhile are told apart.

Why not a lock? If Ctrl-C ends a call, torch runs no hook, so nothing would release the lock. Instead, the
stack of a thread is walked: the thread is in a call if the U-Net is on its stack.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

OWN, INNER = "own", "inner"
"""A call that the user makes, and one that a hook or a layer makes inside such a call."""


class Turn:
    """The call in progress on a U-Net.

    An interruption may come between any two lines, so the state must be valid after every single line.

    Attributes:
        call: what the start of the current call leaves for its end; None between calls. After an
            interruption it is still set when the next call starts.
        waiting: what each inner call in progress must put back at its end.
    """

    def __init__(self) -> None:
        self._owner: dict[str, int] = {}  # the thread of the call in progress
        self.call: Any = None
        self.waiting: list[Any] = []

    def __reduce__(self) -> tuple[Any, ...]:  # a copy has no call in progress
        return Turn, ()

    def take(self, unet: Any) -> str:
        """Start a call; return whether it is OWN or INNER.

        Raises:
            RuntimeError: another thread's call is in progress.
        """
        me = threading.get_ident()
        own = self.call is not None and self._owner.get("thread") == me
        if own and "forward" in _methods_on(sys._getframe(), unet):
            return INNER
        self._owner.setdefault("thread", me)  # atomic: two threads can't both get it
        if self.is_anothers(unet):
            raise RuntimeError(
                "agentsd: this U-Net is in a call of another thread; let threads take turns (a lock around "
                "the pipeline's call), or give each a U-Net of its own (copy.deepcopy)"
            )
        self._owner["thread"] = me
        return OWN

    def whose(self) -> str:
        """Return whether the call that ends is OWN or INNER; "" if it was refused or not handled."""
        if self._owner.get("thread") != threading.get_ident():
            return ""
        return INNER if self.waiting else OWN

    def is_anothers(self, unet: Any) -> bool:
        """Return whether another thread's call is in progress and was not interrupted."""
        owner = self._owner.get("thread", threading.get_ident())
        frame = None if owner == threading.get_ident() else sys._current_frames().get(owner)
        return bool(_methods_on(frame, unet))

    def end(self) -> None:
        """Note that no call is in progress any more."""
        self.call = None
        self.waiting.clear()
        self._owner.clear()


def _methods_on(frame: Any, unet: Any) -> set[str]:
    """Return the names of the U-Net's methods that are on a stack."""
    names = set()
    while frame is not None and unet is not None:
        if frame.f_locals.get("self") is unet:
            names.add(frame.f_code.co_name)
        frame = frame.f_back
    return names
