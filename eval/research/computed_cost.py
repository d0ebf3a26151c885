"""What a computed and a cached step of Stable Diffusion 1.5 and XL ask for, counted at real size on shapes.

A run of `fast` in 25 steps, guided, DPM++ 2M: multiply-adds, and kernels, which are operations that compute
something. Nothing is timed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode

from agentsd.dreambooth.counting import fused_attention
from agentsd.recipe import FAST

from ..cost.macs import counter
from ..environment import describe_environment, describe_run
from ..images.methods import parse_method
from ..pages import rows as results
from ..pages.rows import Column, Row, figure, giga
from ..settings import Settings
from .computed_memory import CASES, denoise, in_dtype, unet
from .settings import CountedSettings

STEPS = 25
FEWER = (17, 12)
"""Plain steps that stand beside the run."""
NO_KERNEL = {"_unsafe_view", "detach", "empty", "set_", "promote_types", "randint"}
"""Operations beside views that launch nothing."""
COLUMNS = [
    Column("", figure("label", "")),
    Column("GMACs", giga("macs")),
    Column("of plain", figure("share", ".3f")),
    Column("kernels", figure("kernels", ",d")),
]


class Kernels(TorchDispatchMode):
    """Counts operations that compute something, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and name not in NO_KERNEL:
            self.counts[name] += 1
        return func(*args, **kwargs or {})


def steps_of(method: str, config: Mapping[str, Any], size: int, steps: int) -> list[tuple[int, int]]:
    """Return the MACs and kernels of each step of a run of one image."""
    model = in_dtype(lambda: unet(config), torch.float16, "meta")
    totals = [(0, 0)]
    with torch.no_grad(), fused_attention(), counter() as macs, Kernels() as kernels:

        def note() -> None:
            totals.append((macs.get_total_flops() // 2, kernels.counts.total()))

        denoise(parse_method(method, None, Settings()), model, size, 1, steps, note)
    return [(a - b, c - d) for (a, c), (b, d) in zip(totals[1:], totals, strict=False)]


def rows_of(case: str, config: Mapping[str, Any], size: int) -> list[Row]:
    """Return a row for each kind of step, and for whole runs."""
    assert FAST.steps is not None
    computed = FAST.steps.full_steps(STEPS)
    plain = steps_of("baseline", config, size, 2)[-1]
    fast = steps_of("fast", config, size, STEPS)
    shown = {
        "plain step": plain,
        "full step": fast[1],
        "cached step": fast[computed.index(False)],
        "full step that corrects": fast[computed.index(True, computed.index(False))],
        f"{STEPS} plain steps": tuple(STEPS * one for one in plain),
        f"`fast`, {STEPS} steps": tuple(map(sum, zip(*fast, strict=True))),
        **{f"{n} plain steps": tuple(n * one for one in plain) for n in FEWER},
    }
    rows = []
    for name, (macs, kernels) in shown.items():
        whole = plain[0] * (STEPS if name.endswith("steps") else 1)
        rows.append({"label": f"{case}, {name}", "macs": macs, "share": macs / whole, "kernels": kernels})
    return rows


def command(settings: CountedSettings, console: Console) -> None:
    """Count each case, print and write all."""
    run = describe_run(settings, describe_environment(torch.device("cpu")))
    rows = [row for case in CASES for row in rows_of(*case)]
    note = "Counted from shapes; nothing was timed. Decoding is left out."
    results.write_rows(settings.out, "cost", rows, {"cost": COLUMNS}, run, note)
    results.show(console, rows, {"cost": COLUMNS}, note, settings.out)
