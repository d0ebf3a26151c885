"""How far a command is: a bar on a terminal, and elsewhere a line a minute."""

from __future__ import annotations

import math
import sys
import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class _Lines(Progress):
    """Progress where there is no terminal: a line a minute on the error stream."""

    told = -math.inf

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        """Note what is done."""
        super().advance(task_id, advance)
        if (now := time.monotonic()) > self.told + 60:
            self.told, task = now, self.tasks[task_id]
            left = "" if task.time_remaining is None else f", {task.time_remaining / 60:.0f} min left"
            print(
                f"{task.description}: {task.completed:g} of {task.total:g}{left}", file=sys.stderr, flush=True
            )


def progress(console: Console, disable: bool = False) -> Progress:
    """Return a progress bar with the time left."""
    if not (disable or console.is_terminal):
        return _Lines(disable=True, speed_estimate_period=600)  # no bar at the end of a file
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        disable=disable,
    )
