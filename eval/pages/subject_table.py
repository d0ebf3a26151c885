"""The tables of a finetuned subject, and their note."""

from collections.abc import Callable, Mapping, Sequence

from .quality_table import change
from .rows import Column, Row, figure

LIKENESS = {"similarity": "similarity", "clip_i": "CLIP-I", "dino": "DINO"}
"""Scores of the subject's images, and their titles."""
FIT = {"right": "right", "clip_t": "CLIP-T"}
"""Scores of other prompts' images."""
NO_SCORES = (
    "No score of likeness was measured: the field's are CLIP-I, CLIP-T and DINO, whose weights --clip and "
    "--dino name (a folder or a hub id, such as openai/clip-vit-base-patch32 and facebook/dino-vits16)."
)
_NOTE = (
    "generate-only: plain training, agents in so many of the steps and token merging in the rest; "
    "train+generate: agents in every step of both; prior: with prior preservation. change: against the "
    "baseline of equal prior preservation and seeds, ± half of a 95% interval; ≈ marks a change inside "
    "the noise, which is that of the images' seeds alone: each training ran once."
)


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
    mean, error = figure(key, form), figure(f"{key}_error", form)
    return lambda row: mean(row) + (f" ± {error(row)}" if row.get(f"{key}_error") is not None else "")


def note(views: int, scores: Mapping[str, str]) -> str:
    """Return what the figures are and how sure, of so many views; `scores` says what each score is."""
    about = "; ".join(f"{(LIKENESS | FIT)[name]}: {text}" for name, text in scores.items())
    return (f"{about}. The subject has {views} views. " if about else f"{NO_SCORES} ") + _NOTE
