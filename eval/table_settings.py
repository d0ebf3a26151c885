"""The settings of the commands that make tables of images."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from .names import is_method
from .settings import (
    FeatureName,
    FewerSteps,
    Methods,
    OneRatio,
    Ratio,
    ReferenceSteps,
    SamplingSettings,
    SchedulerName,
    Steps,
)


class RunSettings(SamplingSettings):
    """Make images with each method and ratio, and a row of quality and cost for each (Table 10)."""

    hidden: ClassVar[tuple[str, ...]] = ("named", "ablate_ratio", "ablate_values")
    resumes: ClassVar[bool] = True
    methods: Methods = ("baseline", "tomesd", "paper", "agentsd")
    fewer_steps: FewerSteps = (0.8, 0.6, 0.4)
    ratios: tuple[Ratio, ...] = (0.1, 0.2, 0.3, 0.4, 0.5)
    """Shares of the tokens that are merged, for every method."""
    ablate_ratio: OneRatio = 0.5
    ablate_values: tuple[float, ...] = ()
    """Values to try; without them, the paper's."""
    images: int = Field(64, ge=2)
    """Images for each row."""
    limit: int | None = Field(None, ge=2)
    """A trial on so many images a row, in OUT-limit-N. It takes as many real images."""
    batch_size: int = Field(8, ge=1)
    """Images made at once. A run may go on with another number."""
    prompts: Path | None = None
    """A text file, a prompt a line. Without one, the toy model's captions are taken."""
    classes: Path | None = None
    """A text file, a class name a line. Two images of each are asked for by the paper's prompt."""
    reference: Path | None = None
    """A folder of real images; else the toy model's own."""
    references: int = Field(4096, ge=8)
    """Fresh scenes, the toy model's real images."""
    reference_steps: ReferenceSteps = None
    other_seeds: bool = False
    """Compare with the baseline's other seeds, too."""
    features: FeatureName = "efficientnet-lite0"
    """Network of FD and KID; inception is that of real FID."""
    clip: str | None = None
    """A CLIP model (folder or hub id) for the CLIP score."""
    out: Path = Path("runs/default")
    """The run's folder. The same folder resumes it."""

    @property
    def most_references(self) -> int | None:
        """How many real images a trial takes; None is all of them."""
        return None if self.limit is None else max(self.limit, 8)

    @model_validator(mode="before")
    @classmethod
    def _trial_apart(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not values.get("limit"):
            return values
        out, mark = Path(values.get("out") or cls.model_fields["out"].default), f"-limit-{values['limit']}"
        return values if out.name.endswith(mark) else {**values, "out": out.with_name(out.name + mark)}


class AblateSettings(RunSettings):
    """Vary one setting of mode paper at one ratio, beside the baseline (Tables 11, 12 and 13)."""

    hidden: ClassVar[tuple[str, ...]] = ("named", "methods", "ratios")
    what: Literal["k", "scale", "early"]
    """k (Table 11), scale (Table 12) or early (Table 13)."""


class CheckSettings(RunSettings):
    """Check the recipes on your own model: baseline, fewer steps and each recipe; a page, and results to
    send.

    Without --prompts, other models than the toy model get prompts that ship with the program.
    """

    hidden: ClassVar[tuple[str, ...]] = ("named", "ratios", "ablate_ratio", "ablate_values", "fewer_steps")
    scheduler: SchedulerName = "dpm++karras"
    steps: Steps = 25
    methods: Methods = ("agentsd", "downsample", "step-caching")
    ratios: tuple[Ratio, ...] = (0.4,)
    """Shares of the tokens that are merged, for every method."""
    calibrated: tuple[Path, ...] = ()
    """Recipes' files that `calibrate` wrote."""
    images: int = Field(32, ge=2)
    """Images for each row."""
    batch_size: int = Field(4, ge=1)
    """Images made at once."""
    reference_steps: ReferenceSteps = 100
    out: Path = Path("runs/check")
    """The run's folder. The same folder resumes it."""

    @field_validator("calibrated")
    @classmethod
    def _of_other_names(cls, calibrated: tuple[Path, ...]) -> tuple[Path, ...]:
        if missing := [str(path) for path in calibrated if not path.exists()]:
            raise ValueError(f"{missing[0]} isn't there; agentsd-eval calibrate makes one")
        names = [path.stem for path in calibrated]
        if twice := [name for name in names if names.count(name) > 1 or is_method(name)]:
            raise ValueError(f"{twice[0]!r} is the name of another row: rename the file")
        return calibrated


class SubjectSettings(SamplingSettings):
    """Teach the model a subject with and without agent attention, and compare how it draws it (Fig. 8)."""

    resumes: ClassVar[bool] = True
    scheduler: SchedulerName = "ddim"
    steps: Steps = 20
    ratio: OneRatio = 0.4
    subject: Path | None = None
    """Folder of the subject's images, 2 or more; else the toy one."""
    instance_prompt: str = "an emoji of a sks face"
    """The prompt that the subject is taught under."""
    class_prompt: str = "an emoji of a face"
    """The prompt whose images preserve the prior."""
    train_steps: int = Field(800, ge=1)
    """Training steps of each finetuning, at batch 1."""
    learning_rate: float = Field(2e-4, gt=0)
    """Learning rate of each finetuning."""
    lr_scheduler: Literal["constant", "linear", "cosine"] = "cosine"
    """Schedule of the learning rate. The paper's is constant; a small model at batch 1 ends better where the
    last steps are small."""
    subject_guidance_scale: float = Field(2.5, ge=0)
    """Guidance of the subject's images. `guidance_scale` is that of the other prompts: the toy model's
    captions are distilled so that 7.5 does what 2.5 did, but not what is taught to it afterwards."""
    class_images: int = Field(16, ge=1)
    """Images of the class that prior preservation trains on. The model makes them before its training."""
    images: int = Field(8, ge=2)
    """Images of the subject for each row."""
    other_prompts: int = Field(16, ge=2)
    """Other prompts, one image each for each row. They are captions that the toy model was trained on, for
    other models prompts that ship with the program."""
    clip: str | None = None
    """A CLIP model (folder or hub id) for CLIP-I and CLIP-T."""
    dino: str | None = None
    """A DINO model (folder or hub id) for the DINO score."""
    out: Path = Path("runs/subject")
    """The run's folder. The same folder resumes it."""

    @model_validator(mode="after")
    def _own_subject(self) -> SubjectSettings:
        asked = ("subject", "instance_prompt", "class_prompt")
        if self.model != "demo" and (missing := [key for key in asked if key not in self.model_fields_set]):
            option = missing[0].replace("_", "-")
            raise ValueError(
                f"{missing[0]}: the bundled subject is for the toy model; give --{option}, as in "
                "--subject FOLDER --instance-prompt 'a photo of a sks dog' --class-prompt 'a photo of a dog'"
            )
        return self
