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


@dataclass(frozen=True)
class Training:
    """How the weights of a row came about."""

    apply: str | None
    """As `DreamBoothConfig.apply`; None is the model before finetuning."""
    prior: bool = False

    @property
    def key(self) -> str:
        """The name of its folder."""
        kind = "before" if self.apply is None else "baseline" if self.apply == "none" else "agents"
        return f"{kind}-prior" if self.prior else kind


@dataclass(frozen=True)
class Variant:
    """A row: weights, and how they generate."""

    training: Training
    method: Method
    name: str
    """Where agents run; the same without and with prior preservation."""


TRAININGS = tuple(Training(apply, prior) for prior in (False, True) for apply in ("none", "train+generate"))


def training_config(training: Training, settings: SubjectSettings) -> DreamBoothConfig:
    """Return the settings of a finetuning: `settings`, and the paper's (appendix B.4) for the rest."""
    return DreamBoothConfig.model_validate(
        {
            "pretrained_model_name_or_path": settings.model,
            "instance_data_dir": views_folder(settings),
            "instance_prompt": settings.instance_prompt,
            "with_prior_preservation": training.prior,
            "class_data_dir": settings.out / "classes",
            "class_prompt": settings.class_prompt,
            "num_class_images": settings.class_images,
            "output_dir": settings.out / training.key / "model",
            "max_train_steps": settings.train_steps,
            "learning_rate": settings.learning_rate,
            "lr_scheduler": settings.lr_scheduler,
            "use_8bit_adam": False,  # the same optimizer on every device
            "seed": settings.seed,
            "checkpointing_steps": 100,
            "checkpoints_total_limit": 1,
            "resume_from_checkpoint": "latest",
            "num_validation_images": 1,
            "num_inference_steps": settings.steps,
            "guidance_scale": settings.guidance_scale,
            "report_to": None,
            "ratio": settings.ratio,
            "apply": training.apply,
        }
    )


def variants_of(settings: SubjectSettings) -> list[Variant]:
    """Return the rows: the model as it came, then those of Fig. 8, without and with prior preservation."""
    every = training_config(TRAININGS[0], settings).recipe
    baseline = parse_method("baseline", None, settings)

    def agents(share: float) -> Method:
        later = Merge(settings.ratio, ranking="layer", destinations="random")
        early = every if share == 1 else Recipe(Phases(every.operators[0], later, share), levels=1)
        return Method(("agents",), settings.ratio, settings.backend, recipe=early)

    rows = [Variant(Training(None), baseline, "before finetuning")]
    for training in TRAININGS:
        if training.apply == "none":
            rows.append(Variant(training, baseline, "baseline"))
            for share in (Phases.early_frac, 1.0):
                rows.append(Variant(training, agents(share), f"generate-only {share:.0%}"))
        else:
            rows.append(Variant(training, agents(1.0), "train+generate"))
    return rows


def baseline_of(variant: Variant, variants: Sequence[Variant]) -> Variant:
    """Return the row to compare with: the row "baseline" of the same prior."""
    training = Training("none", variant.training.prior)
    return next(v for v in variants if v.training == training and not v.method.parts)


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


def store_of(variant: Variant, settings: SubjectSettings) -> Store:
    """Return where a row's images are; rows of the same weights share it."""
    return Store(settings.out / variant.training.key)


def as_trained(path: Path, side: int) -> Image.Image:
    """Return a view as the training sees it: its centre square, on white."""
    pixels = (load_image(path, side) + 1) * 127.5
    return Image.fromarray(pixels.round().byte().permute(1, 2, 0).numpy())
