"""The tables of cost alone."""

from collections.abc import Callable, Sequence

from .rows import Column, Row, figure, giga, method_text


def columns_of(rows: Sequence[Row], clock: str) -> list[Column]:
    """Return the columns of a table; `clock` ("wall" or "CPU") is what its speed-ups are computed from.

    The case stands in columns where there are several; without a GPU there is no memory column, and
    speed-ups over SDPA stand apart where there is another kind of attention.
    """
    cases = {(row["scope"], row["size"], row["batch"]) for row in rows}
    backends = {row["backend"] for row in rows}
    columns = [Column("method", method_text), Column("attention", figure("backend", ""))]
    if len(cases) > 1:
        columns += [
            Column("scope", figure("scope", "")),
            Column("px", figure("size", "d")),
            Column("batch", figure("batch", "d")),
        ]
    columns += [
        Column("s", figure("seconds", ".3f", "out of memory")),
        Column("CPU s", figure("cpu_seconds", ".3f")),
        Column(f"speed-up ({clock} time)", _speedup_text("speedup")),
    ]
    if backends != {"sdpa"}:
        columns.append(Column("over SDPA baseline", _speedup_text("speedup_over_sdpa")))
    columns.append(Column("GMACs", giga("macs")))
    for title, key in (("GB/image", "memory_per_image"), ("GB saved for backward", "saved_for_backward")):
        if any(row.get(key) is not None for row in rows):
            columns.append(Column(title, figure(key, ".2f")))
    return columns


def _speedup_text(key: str) -> Callable[[Row], str]:
    def text(row: Row) -> str:
        if row[key] is None:
            return "-"
        return f"{row[key]:.2f}x ({row[f'{key}_low']:.2f}-{row[f'{key}_high']:.2f})"

    return text
