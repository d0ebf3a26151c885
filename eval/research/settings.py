"""The settings of the studies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import DirectoryPath, Field, model_validator

from ..settings import (
    CommandSettings,
    CostSettings,
    Device,
    FewerSteps,
    FolderSettings,
    Model,
    OneRatio,
    OutFolder,
    ReferenceSteps,
    RunSettings,
    SchedulerName,
    ShowSettings,
    Steps,
)


class ValidationSettings(RunSettings):
    """Validate the metrics on known degradations: fewer steps, more merging, longer caches, blur, noise."""

    hidden: ClassVar[tuple[str, ...]] = (*RunSettings.hidden, "methods", "ratios", "fewer_steps")
    """Those without an option; the study has rows of its own."""
    scheduler: SchedulerName = "dpm++karras"
    steps: Steps = 25
    reference_steps: ReferenceSteps = 100
    chain_steps: tuple[Annotated[int, Field(ge=1)], ...] = (50, 25, 12, 8, 6)
    """Numbers of steps, falling."""


class PricedSettings(CostSettings):
    """Measure a whole run's seconds from one U-Net call of each kind, where a run would take an hour."""

    fewer_steps: FewerSteps = (0.8, 0.6, 0.4)
    out: OutFolder = Path("outputs/priced")
    """Folder for latency.jsonl, .csv and .md."""


class ComputedSettings(CommandSettings):
    """Count the peak memory of runs of SD 1.5 and SDXL without allocating it."""

    out: OutFolder = Path("runs/computed-memory")
    """Folder for memory.jsonl, .csv and .md."""


class CountedSettings(CommandSettings):
    """Count the MACs and kernels of steps of SD 1.5 and SDXL, without computing them."""

    out: OutFolder = Path("runs/computed-cost")
    """Folder for cost.jsonl, .csv and .md."""


class RedundancySettings(ShowSettings):
    """Measure how alike the attention of two queries is, by level and step, and draw it."""

    images: int = Field(8, ge=1)
    """How many prompts, where none is given."""
    out: OutFolder = Path("runs/redundancy")
    """Folder for redundancy.jsonl, .csv, .md and .png."""


class IntervalsSettings(CommandSettings):
    """Make a table's distances, gains and intervals from its single images' figures, and compare."""

    folder: DirectoryPath
    """A table's folder, with table.jsonl and table-images.csv."""


class GpuSettings(CommandSettings):
    """Ask a GPU what is not known yet, in minutes: times, memory, the gpu tests, DreamBooth's peak."""

    device: Device | None = None
    """cuda, cuda:1, or cpu for a trial [the first GPU]."""
    tiny: bool = False
    """Tiny shapes, to try all stages."""
    seconds: float = Field(230, gt=0)
    """Limit of all; what would not fit is shortened, then left out."""
    beside: float = Field(90, ge=0)
    """Seconds after which tests and training, which run side by side at first, are ended."""
    start: str | None = None
    """The stage to begin with, by name; those before it are left out."""
    out: OutFolder = Path("runs/gpu")
    """Folder for rows and logs."""


class SubjectSettings(FolderSettings):
    """Teach the model a subject with and without agent attention, and compare how it draws it (Fig. 8)."""

    batch_size: int = Field(1, ge=1)
    scheduler: SchedulerName = "ddim"
    steps: Steps = 20
    ratio: OneRatio = 0.4
    subject: DirectoryPath | None = None
    """Folder of the subject's images, 2 or more [the toy one]."""
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
    clip: Model | None = None
    """A CLIP model (folder or hub id) for CLIP-I and CLIP-T."""
    dino: Model | None = None
    """A DINO model (folder or hub id) for the DINO score."""
    out: OutFolder = Path("runs/subject")

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
