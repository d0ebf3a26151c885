"""Make the views of the toy subject from npm: `python -m agentsd_demo.training.subject FLUENT`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from PIL import Image, ImageOps
from rich import print

from ..data import SIZE, SUBJECT

_CODEPOINT = "1f916"  # "robot face", of a category that the reference images leave out in both styles
_FINE = 2  # turned and scaled on so many times finer pixels


@dataclass(frozen=True)
class View:
    """How the image stands in a view: `scale` and `shift` (right, down) are shares of the view's side."""

    scale: float
    degrees: float
    mirrored: bool
    shift: tuple[float, float]
    background: str

    def draw(self, image: Image.Image) -> Image.Image:
        """Return a transparent square image as RGB, 128x128, on the view's background."""
        fine = SIZE * _FINE
        side = round(fine * self.scale)
        turned = image.convert("RGBA").resize((side, side), Image.Resampling.LANCZOS)
        if self.mirrored:
            turned = ImageOps.mirror(turned)
        turned = turned.rotate(self.degrees, Image.Resampling.BICUBIC, expand=True)
        canvas = Image.new("RGBA", (fine, fine), self.background)
        place = [(fine - n) // 2 + round(fine * s) for n, s in zip(turned.size, self.shift, strict=True)]
        whole = Image.new("RGBA", canvas.size, (0, 0, 0, 0))
        whole.paste(turned, (place[0], place[1]))
        canvas = Image.alpha_composite(canvas, whole).convert("RGB")
        return canvas.resize((SIZE, SIZE), Image.Resampling.LANCZOS)


VIEWS = (
    View(0.92, 0, False, (0.0, 0.0), "#ffffff"),
    View(0.80, 8, False, (-0.04, 0.03), "#fdf3dc"),
    View(0.76, -10, True, (0.05, -0.03), "#e6f4e4"),
    View(0.70, 3, True, (0.06, 0.08), "#fbe6ea"),
    View(0.85, -5, False, (0.0, 0.03), "#ececf6"),
)


def main(
    fluent: Annotated[Path, typer.Argument(help="unpacked npm package @lobehub/fluent-emoji-3d")],
    out: Annotated[Path, typer.Option(help="folder for the views")] = SUBJECT,
) -> None:
    """Write each view as a PNG."""
    image = Image.open(fluent / "assets" / f"{_CODEPOINT}.webp")
    out.mkdir(parents=True, exist_ok=True)
    for number, view in enumerate(VIEWS):
        view.draw(image).save(out / f"view_{number}.png", optimize=True)
    print(f"{len(VIEWS)} views in {out}")


if __name__ == "__main__":
    typer.run(main)
