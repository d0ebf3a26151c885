"""The table of cost alone."""

from collections.abc import Sequence

from .rows import Column, Row, figure, filled, giga, method_text


def tables_of(rows: Sequence[Row], clock: str) -> dict[str, list[Column]]:
    """Return the columns of the table by its title; `clock` is what its speed-ups are computed from.

    Without a GPU there is no column of memory.
    """
    columns = [
        Column("method", method_text),
        Column("attention", figure("backend", "")),
        Column("scope", figure("scope", "")),
        Column("px", figure("size", "d")),
        Column("batch", figure("batch", "d")),
        Column("s", figure("seconds", ".3f", "out of memory")),
        Column("CPU s", figure("cpu_seconds", ".3f")),
        Column(f"speed-up ({clock} time)", _speedup_text),
        Column("GMACs", giga("macs")),
        Column("GB/image", figure("memory_per_image", ".2f")),
    ]
    return {"cost alone": filled(rows, columns)}


def _speedup_text(row: Row) -> str:
    if row["speedup"] is None:
        return "-"
    return f"{row['speedup']:.2f}x ({row['speedup_low']:.2f}-{row['speedup_high']:.2f})"
