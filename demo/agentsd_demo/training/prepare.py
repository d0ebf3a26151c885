"""Make the reference grids from two npm packages: `python -m agentsd_demo.training.prepare FLUENT NOTO`."""

import json
from pathlib import Path
from typing import Annotated

import typer
from PIL import Image
from rich import print

from ..data import GRID_COLUMNS, REFERENCES, SIZE, STYLES, Style, caption_of, split_of

LEFT_OUT = {"Smileys & Emotion", "People & Body", "Flags", "Symbols", "Component"}
PLAIN_NAMES = {
    "aubergine": "eggplant",
    "automobile": "car",
    "black scissors": "scissors",
    "black sun with rays": "sun",
    "ear of maize": "corn",
    "electric light bulb": "light bulb",
    "hocho": "kitchen knife",
    "lady beetle": "ladybug",
    "octagonal sign": "stop sign",
    "oncoming automobile": "oncoming car",
    "snowman without snow": "plain snowman",
    "vertical traffic light": "traffic light",
    "white medium star": "star",
    "high voltage sign": "lightning bolt",
    "wrapped present": "gift",
}


def _key(codepoints: str) -> str:
    """Drop the presentation selector and the joiner, which the two packages write differently."""
    return "-".join(part for part in codepoints.lower().split("-") if part not in ("fe0f", "200d"))


def _sprite(path: Path) -> Image.Image:
    return Image.open(path).convert("RGBA").resize((SIZE, SIZE), Image.Resampling.LANCZOS)


def find_sprites(fluent: Path, noto: Path) -> list[tuple[str, dict[Style, Path]]]:
    """Return (concept, style -> file) for every emoji that is kept, in the order of Unicode's charts."""
    assets = {_key(path.stem): path for path in (fluent / "assets").glob("*.webp")}
    found = []
    entries = json.loads((noto / "emoji.json").read_text(encoding="utf-8"))
    for entry in sorted(entries, key=lambda entry: entry["sort_order"]):
        if entry["category"] in LEFT_OUT:
            continue
        name = entry["name"].lower().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
        files: dict[Style, Path] = {"noto": noto / "img" / "google" / "64" / entry["image"]}
        if _key(entry["unified"]) in assets:
            files["3d"] = assets[_key(entry["unified"])]
        found.append((PLAIN_NAMES.get(name, name), files))
    return found


def main(
    fluent: Annotated[Path, typer.Argument(help="unpacked npm package @lobehub/fluent-emoji-3d")],
    noto: Annotated[Path, typer.Argument(help="unpacked npm package emoji-datasource-google")],
    out: Annotated[Path, typer.Option(help="folder for the grids and the index")] = REFERENCES,
) -> None:
    """Write one lossless grid with transparency per style and `index.jsonl`."""
    sprites = find_sprites(fluent, noto)
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    for style in STYLES:
        kept = [(concept, files[style]) for concept, files in sprites if style in files]
        height = SIZE * -(-len(kept) // GRID_COLUMNS)
        grid = Image.new("RGBA", (SIZE * GRID_COLUMNS, height))
        for cell, (concept, file) in enumerate(kept):
            row, column = divmod(cell, GRID_COLUMNS)
            grid.paste(_sprite(file), (SIZE * column, SIZE * row))
            alone = len(dict(sprites)[concept]) == 1
            rows.append(
                {
                    "concept": concept,
                    "style": style,
                    "caption": caption_of(concept, style),
                    "split": "seen" if alone else split_of(concept, style),
                    "cell": cell,
                }
            )
        grid.save(out / f"{style}.webp", lossless=True, quality=100, method=6)
    index = "".join(json.dumps(row) + "\n" for row in rows)
    (out / "index.jsonl").write_text(index, encoding="utf-8")
    print(f"{len(rows)} images of {len(sprites)} concepts in {out}")


if __name__ == "__main__":
    typer.run(main)
