"""The tables of a finetuned subject."""

from collections.abc import Callable, Sequence

from .quality_table import change
from .rows import Column, Row, figure

LIKENESS = {"similarity": "similarity", "clip_i": "CLIP-I", "dino": "DINO"}
"""Scores of the subject's images, and their titles."""
FIT = {"right": "right", "clip_t": "CLIP-T"}
"""Scores of other prompts' images."""


def label_of(row: Row) -> str:
    """Return what a row is called."""
    return row["variant"] + (", prior" if row.get("prior") else "")


def tables_of(rows: Sequence[Row]) -> dict[str, list[Column]]:
    """Return the columns of each table by its title; scores that no row has are left out."""

    def columns(scores: dict[str, str], count: str) -> list[Column]:
        found = []
        for name in scores:
            if any(name in row for row in rows):
                form = ".1%" if name == "right" else ".3f"
                found.append(Column(f"{scores[name]} ± s.e.", _with_error(name, form)))
                found.append(Column("change", change(name, form, count=count)))
        return found

    tables = {
        "the subject": columns(LIKENESS, "images"),
        "other prompts": columns(FIT, "other_images"),
        "cost": [
            Column("s/img", figure("seconds", ".2f")),
            Column("CPU s/img", figure("cpu_seconds", ".2f")),
            Column("speed-up", figure("speedup", ".2f")),
        ],
    }
    first = Column("variant", label_of)
    return {title: [first, *columns] for title, columns in tables.items() if columns}


def _with_error(key: str, form: str) -> Callable[[Row], str]:
    def text(row: Row) -> str:
        value, error = row.get(key), row.get(f"{key}_error")
        if value is None:
            return "-"
        return format(value, form) + (f" ± {format(error, form)}" if error is not None else "")

    return text
