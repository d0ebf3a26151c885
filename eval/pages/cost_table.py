"""The table of cost alone."""

from collections.abc import Sequence

from .rows import Column, Row, figure, giga, method_text


def columns_of(rows: Sequence[Row], clock: str) -> list[Column]:
    """Return the columns of a table; `clock` ("wall" or "CPU") is what its speed-ups are computed from.

    The case stands in columns where there are several; without a GPU there is no memory column.
    """
    columns = [Column("method", method_text), Column("attention", figure("backend", ""))]
    if len({(row["scope"], row["size"], row["batch"]) for row in rows}) > 1:
        columns += [
            Column("scope", figure("scope", "")),
            Column("px", figure("size", "d")),
            Column("batch", figure("batch", "d")),
        ]
    columns += [
        Column("s", figure("seconds", ".3f", "out of memory")),
        Column("CPU s", figure("cpu_seconds", ".3f")),
        Column(f"speed-up ({clock} time)", _speedup_text),
        Column("GMACs", giga("macs")),
    ]
    if any(row.get("memory_per_image") is not None for row in rows):
        columns.append(Column("GB/image", figure("memory_per_image", ".2f")))
    return columns


def _speedup_text(row: Row) -> str:
    if row["speedup"] is None:
        return "-"
    return f"{row['speedup']:.2f}x ({row['speedup_low']:.2f}-{row['speedup_high']:.2f})"
