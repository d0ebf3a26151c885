"""The tables of a finetuned subject, and their note."""

from collections.abc import Callable, Mapping, Sequence

from ..intervals import enough
from ..pages.quality_table import change
from ..pages.rows import Column, Row, figure, filled

SCORES = {
    "the subject": {"similarity": "similarity", "clip_i": "CLIP-I", "dino": "DINO"},
    "other prompts": {"right": "right", "clip_t": "CLIP-T"},
}
"""Scores of the subject's images and of other prompts' images, and their titles."""
NO_SCORES = (
    "No score of likeness was measured: the field's are CLIP-I, CLIP-T and DINO, whose weights --clip and "
    "--dino name (a folder or a hub id, such as openai/clip-vit-base-patch32 and facebook/dino-vits16)."
)
_NOTE = (
    "generate-only: plain training, agents in so many of the steps and token merging in the rest; "
    "train+generate: agents in every step of both; prior: with prior preservation. change: against the "
    "baseline of equal prior preservation and seeds, ± half of a 95% interval; ≈ marks a change inside "
    "the noise, which is that of the images' seeds alone: each training ran once. Speed-ups are against the "
    "model before finetuning."
)


def label_of(row: Row) -> str:
    """Return what a row is called."""
    return row["variant"] + (", prior" if row.get("prior") else "")


def tables_of(rows: Sequence[Row]) -> dict[str, list[Column]]:
    """Return the columns of each table by its title; scores that no row has are left out."""
    tables: dict[str, list[Column]] = {}
    for (title, scores), count in zip(SCORES.items(), ("images", "other_images"), strict=True):
        tables[title] = []
        for name, score in scores.items():
            form = ".1%" if name == "right" else ".3f"
            tables[title] += [Column(f"{score} ± s.e.", _with_error(name, form, count))]
            tables[title] += [Column("change", change(name, form, count=count))]
    tables["cost"] = [
        Column("s/img", figure("seconds", ".2f")),
        Column("CPU s/img", figure("cpu_seconds", ".2f")),
        Column("speed-up", figure("speedup", ".2f")),
    ]
    shown = {title: filled(rows, columns) for title, columns in tables.items()}
    return {title: [Column("variant", label_of), *columns] for title, columns in shown.items() if columns}


def _with_error(key: str, form: str, count: str) -> Callable[[Row], str]:
    mean, error = figure(key, form), figure(f"{key}_error", form)

    def text(row: Row) -> str:
        told = row.get(f"{key}_error") is not None and enough(row, count)
        return mean(row) + (f" ± {error(row)}" if told else "")

    return text


def note(views: int, scores: Mapping[str, str]) -> str:
    """Return what the figures are and how sure, of so many views; `scores` says what each score is."""
    titles = {name: title for scores in SCORES.values() for name, title in scores.items()}
    about = "; ".join(f"{titles[name]}: {text}" for name, text in scores.items())
    return (f"{about}. The subject has {views} views. " if about else f"{NO_SCORES} ") + _NOTE
