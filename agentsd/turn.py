"""Whose turn it is: one call at a time is under way on a U-Net, and what comes meanwhile is told apart.

A lock won't do. torch runs no hook for a call that Ctrl-C ends, so nothing would open the lock again. What
can be asked is whether a thread is in a call: then the U-Net is on its stack, which is walked.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

OWN, INNER = "own", "inner"
"""A call of the caller's; one that a hook or a layer makes inside it."""


class Turn:
    """The call under way on a U-Net.

    An interruption may come between any two lines: nothing here is right only if two of them ran.

    Attributes:
        call: what the beginning of the call under way leaves to its end; None between calls, and until it is
            known. A call that was interrupted is still there when the next begins.
        waiting: what each inner call under way has to put back at its end.
    """

    def __init__(self) -> None:
        self._owner: dict[str, int] = {}  # the thread of the call under way
        self.call: Any = None
        self.waiting: list[Any] = []

    def __reduce__(self) -> tuple[Any, ...]:  # a copy has no call under way
        return Turn, ()

    def take(self, unet: Any) -> str:
        """Whose the call is that begins: OWN or INNER.

        Raises:
            RuntimeError: a call of another thread is under way.
        """
        me = threading.get_ident()
        own = self.call is not None and self._owner.get("thread") == me
        if own and "forward" in _methods_on(sys._getframe(), unet):
            return INNER
        self._owner.setdefault("thread", me)  # at once, for all threads
        if self.is_anothers(unet):
            raise RuntimeError(
                "agentsd: this U-Net is in a call of another thread; let threads take turns (a lock around "
                "the pipeline's call), or give each a U-Net of its own (copy.deepcopy)"
            )
        self._owner["thread"] = me
        return OWN

    def whose(self) -> str:
        """Whose the call is that ends; nothing where it was refused, or left alone."""
        if self._owner.get("thread") != threading.get_ident():
            return ""
        return INNER if self.waiting else OWN

    def is_anothers(self, unet: Any) -> bool:
        """Whether a call of another thread is under way, which was not interrupted."""
        owner = self._owner.get("thread", threading.get_ident())
        frame = None if owner == threading.get_ident() else sys._current_frames().get(owner)
        return bool(_methods_on(frame, unet))

    def end(self) -> None:
        """No call is under way any more."""
        self.call = None
        self.waiting.clear()
        self._owner.clear()


def _methods_on(frame: Any, unet: Any) -> set[str]:
    """The names of the U-Net's methods that a stack is in."""
    names = set()
    while frame is not None and unet is not None:
        if frame.f_locals.get("self") is unet:
            names.add(frame.f_code.co_name)
        frame = frame.f_back
    return names
