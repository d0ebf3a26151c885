"""What the study of a finetuned subject trains and draws: its trainings, rows, views and prompts."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from PIL import Image

from agentsd import Merge, Phases, Recipe
from agentsd.dreambooth.config import DreamBoothConfig
from agentsd.dreambooth.data import find_images, load_image

from ..errors import EvalError
from ..images.methods import Method
from ..images.prompts import ImageSpec, from_prompts, prompts_of
from .settings import SubjectSettings

TRAININGS = ("baseline", "agents", "baseline-prior", "agents-prior")
"""Plain or with agents in every step, without or with prior preservation: the names of their folders, too."""


@dataclass(frozen=True)
class Variant(Method):
    """A row: weights, and the method that generates with them.

    Attributes:
        weights: a training, or "before" it.
        where: where agents run; the same without and with prior preservation.
        unet: of these weights, once they are trained; None is the pipeline's own.
    """

    weights: str = "before"
    where: str = "before finetuning"
    unet: Any = field(default=None, compare=False, repr=False)

    @property
    def prior(self) -> bool:
        """Whether its training preserved the prior."""
        return self.weights.endswith("-prior")

    @property
    def key(self) -> str:
        """A folder name that differs wherever the images may differ."""
        return f"{self.weights}-{super().key}"

    @contextmanager
    def applied(self, pipe: Any, seed: int = 0) -> Iterator[None]:
        """Give `pipe` the weights and the method for the length of a block."""
        before = pipe.unet
        pipe.unet = self.unet or before
        try:
            with super().applied(pipe, seed):
                yield
        finally:
            pipe.unet = before


def training_config(training: str, settings: SubjectSettings) -> DreamBoothConfig:
    """Return the settings of a finetuning: `settings`, and the paper's (appendix B.4) for the rest."""
    same = "instance_prompt class_prompt learning_rate lr_scheduler seed guidance_scale ratio"
    own = {
        "pretrained_model_name_or_path": settings.model,
        "instance_data_dir": views_folder(settings),
        "with_prior_preservation": training.endswith("-prior"),
        "class_data_dir": settings.out / "classes",
        "num_class_images": settings.class_images,
        "output_dir": settings.out / training / "model",
        "max_train_steps": settings.train_steps,
        "use_8bit_adam": False,  # the same optimizer on every device
        "checkpointing_steps": 100,
        "checkpoints_total_limit": 1,
        "resume_from_checkpoint": "latest",
        "num_validation_images": 1,
        "num_inference_steps": settings.steps,
        "report_to": None,
        "apply": "train+generate" if training.startswith("agents") else "none",
    }
    return DreamBoothConfig.model_validate(settings.model_dump(include={*same.split()}) | own)


def variants_of(settings: SubjectSettings) -> list[Variant]:
    """Return the rows: the model as it came, then those of Fig. 8, without and with prior preservation."""
    every = training_config("agents", settings).recipe
    later = Merge(settings.ratio, ranking="layer", destinations="random")
    early = Recipe(Phases(every.operators[0], later), levels=1)

    def variant(weights: str, where: str, recipe: Recipe | None = None) -> Variant:
        parts = ("agents",) if recipe else ()
        ratio = settings.ratio if recipe else None
        return Variant(parts, ratio, settings.backend, recipe, weights=weights, where=where)

    rows = [variant("before", "before finetuning")]
    for prior in ("", "-prior"):
        rows += [
            variant(f"baseline{prior}", "baseline"),
            variant(f"baseline{prior}", f"generate-only {Phases.early_frac:.0%}", early),
            variant(f"baseline{prior}", "generate-only 100%", every),
            variant(f"agents{prior}", "train+generate", every),
        ]
    return rows


def baseline_of(variant: Variant, variants: Sequence[Variant]) -> Variant:
    """Return the row to compare with: the row "baseline" of the same prior."""
    return next(v for v in variants if v.where == "baseline" and v.prior == variant.prior)


def views_folder(settings: SubjectSettings) -> Path:
    """Return the folder of the subject's images."""
    if settings.subject is not None:
        return settings.subject
    from agentsd_demo import SUBJECT

    return SUBJECT


def views_of(settings: SubjectSettings) -> list[Path]:
    """Return the subject's images. Raises EvalError if one can't be read or there are fewer than 2."""
    try:
        paths = find_images(views_folder(settings))
    except ValueError as error:
        raise EvalError(f"subject: {error}") from error
    if len(paths) < 2:
        raise EvalError(f"subject: {views_folder(settings)} holds 1 image; 2 views or more can be compared")
    return paths


def specs_of(settings: SubjectSettings) -> tuple[list[ImageSpec], list[ImageSpec]]:
    """Return the subject's images, and those of other prompts, of the toy model what it was trained on."""
    own = from_prompts([settings.instance_prompt], settings.images, settings.seed)
    others = prompts_of(settings.model, settings.other_prompts, settings.seed + len(own), "seen")
    return own, [replace(spec, index=len(own) + spec.index) for spec in others]


def as_trained(path: Path, side: int) -> Image.Image:
    """Return a view as the training sees it: its centre square, on white."""
    pixels = (load_image(path, side) + 1) * 127.5
    return Image.fromarray(pixels.round().byte().permute(1, 2, 0).numpy())
