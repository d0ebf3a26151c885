"""Make the reference grids from two npm packages and a font.

`python -m agentsd_demo.training.prepare FLUENT NOTO NotoColorEmoji.ttf`
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from PIL import Image, ImageDraw, ImageFont
from rich import print

from ..data import (
    GRID_COLUMNS,
    LARGE,
    REFERENCES,
    SPRITE,
    STYLES,
    Style,
    caption_of,
    split_of,
    trained_concepts,
)

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


def _sprite(path: Path, side: int = SPRITE) -> Image.Image:
    return Image.open(path).convert("RGBA").resize((side, side), Image.Resampling.LANCZOS)


def draw_glyph(font: Path, codepoints: str) -> Image.Image:
    """Return the bitmap of a character, such as "1f98a", from the font of Noto's emoji: 128x128, RGBA."""
    text = "".join(chr(int(part, 16)) for part in codepoints.split("-"))
    canvas = Image.new("RGBA", (136, 128))  # of the font's one size
    draw = ImageDraw.Draw(canvas)
    draw.text((0, 0), text, font=ImageFont.truetype(font, 109), embedded_color=True)
    straight = Image.frombytes("RGBa", canvas.size, canvas.tobytes()).convert("RGBA")  # it draws alpha twice
    return straight.crop((4, 0, 132, 128))  # as the npm package's image of 64 px is


def _grid(sprites: Sequence[Image.Image]) -> Image.Image:
    side = sprites[0].width
    columns, rows = min(GRID_COLUMNS, len(sprites)), -(-len(sprites) // GRID_COLUMNS)
    grid = Image.new("RGBA", (side * columns, side * rows))
    for cell, sprite in enumerate(sprites):
        row, column = divmod(cell, GRID_COLUMNS)
        grid.paste(sprite, (side * column, side * row))
    return grid


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
    font: Annotated[Path, typer.Argument(help="NotoColorEmoji.ttf of Debian's fonts-noto-color-emoji")],
    out: Annotated[Path, typer.Option(help="folder for the grids and the index")] = REFERENCES,
) -> None:
    """Write two lossless grids with transparency per style, of all and of the trained, and `index.jsonl`."""
    sprites = find_sprites(fluent, noto)
    trained = sorted(trained_concepts())
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    for style in STYLES:
        kept = {concept: files[style] for concept, files in sprites if style in files}
        for cell, concept in enumerate(kept):
            alone = len(dict(sprites)[concept]) == 1
            row = {
                "concept": concept,
                "style": style,
                "caption": caption_of(concept, style),
                "split": "seen" if alone else split_of(concept, style),
                "cell": cell,
            }
            rows.append(row | ({"large": trained.index(concept)} if concept in trained else {}))
        files = [kept[concept] for concept in trained]
        large = {
            "3d": lambda file: _sprite(file, LARGE["3d"]),
            "noto": lambda file: draw_glyph(font, file.stem),
        }[style]
        for kind, grid in (("", map(_sprite, kept.values())), ("_large", map(large, files))):
            _grid(list(grid)).save(out / f"{style}{kind}.webp", lossless=True, quality=100, method=6)
    index = "".join(json.dumps(row) + "\n" for row in rows)
    (out / "index.jsonl").write_text(index, encoding="utf-8")
    print(f"{len(rows)} images of {len(sprites)} concepts in {out}")


if __name__ == "__main__":
    typer.run(main)
