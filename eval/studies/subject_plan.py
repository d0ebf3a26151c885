"""What the study of a finetuned subject trains and draws: its trainings, rows, views and prompts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from agentsd import Merge, Phases, Recipe
from agentsd.dreambooth.config import DreamBoothConfig
from agentsd.dreambooth.data import find_images, load_image

from ..errors import EvalError
from ..files import read_lines
from ..images.methods import Method, parse_method
from ..images.prompts import SHIPPED, ImageSpec, from_prompts, from_triples
from ..images.store import Store
from ..settings import SubjectSettings

if TYPE_CHECKING:
    from agentsd_demo.scenes import Triple


TRAININGS = ("baseline", "agents", "baseline-prior", "agents-prior")
"""Plain or with agents in every step, without or with prior preservation: the names of their folders, too."""


@dataclass(frozen=True)
class Variant:
    """A row: weights, and how they generate.

    Attributes:
        weights: a training, or "before" it.
        name: where agents run; the same without and with prior preservation.
        method: what generates.
    """

    weights: str
    name: str
    method: Method

    @property
    def prior(self) -> bool:
        """Whether its training preserved the prior."""
        return self.weights.endswith("-prior")

    def store(self, settings: SubjectSettings) -> Store:
        """Where its images are; rows of the same weights share it."""
        return Store(settings.out / self.weights)


def training_config(training: str, settings: SubjectSettings) -> DreamBoothConfig:
    """Return the settings of a finetuning: `settings`, and the paper's (appendix B.4) for the rest."""
    same = {
        "instance_prompt",
        "class_prompt",
        "learning_rate",
        "lr_scheduler",
        "seed",
        "guidance_scale",
        "ratio",
    }
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
    return DreamBoothConfig.model_validate(settings.model_dump(include=same) | own)


def variants_of(settings: SubjectSettings) -> list[Variant]:
    """Return the rows: the model as it came, then those of Fig. 8, without and with prior preservation."""
    baseline = parse_method("baseline", None, settings)
    every = training_config("agents", settings).recipe
    later = Merge(settings.ratio, ranking="layer", destinations="random")
    early = Recipe(Phases(every.operators[0], later), levels=1)
    agents = {
        recipe: Method(("agents",), settings.ratio, settings.backend, recipe=recipe)
        for recipe in (early, every)
    }
    rows = [Variant("before", "before finetuning", baseline)]
    for prior in ("", "-prior"):
        rows += [
            Variant(f"baseline{prior}", "baseline", baseline),
            Variant(f"baseline{prior}", f"generate-only {Phases.early_frac:.0%}", agents[early]),
            Variant(f"baseline{prior}", "generate-only 100%", agents[every]),
            Variant(f"agents{prior}", "train+generate", agents[every]),
        ]
    return rows


def baseline_of(variant: Variant, variants: Sequence[Variant]) -> Variant:
    """Return the row to compare with: the row "baseline" of the same prior."""
    return next(v for v in variants if v.name == "baseline" and v.prior == variant.prior)


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
    """Return the subject's images, and those of other prompts."""
    own = [ImageSpec(i, settings.instance_prompt, settings.seed + i) for i in range(settings.images)]
    first = settings.seed + len(own)
    if settings.model == "demo":
        others = from_triples(seen_triples(), settings.other_prompts, first)
    else:
        others = from_prompts(read_lines(SHIPPED), settings.other_prompts, first)
    return own, [replace(spec, index=len(own) + spec.index) for spec in others]


def seen_triples() -> "Sequence[Triple]":
    """Return what the toy model was trained on."""
    from agentsd_demo.scenes import triples

    return triples("seen")


def as_trained(path: Path, side: int) -> Image.Image:
    """Return a view as the training sees it: its centre square, on white."""
    pixels = (load_image(path, side) + 1) * 127.5
    return Image.fromarray(pixels.round().byte().permute(1, 2, 0).numpy())
