"""The settings of the studies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ..settings import (
    CommandSettings,
    CostSettings,
    FewerSteps,
    ReferenceSteps,
    RunSettings,
    SchedulerName,
    ShowSettings,
    Steps,
)

Size = Annotated[int, Field(ge=64, multiple_of=8)]


class ValidationSettings(RunSettings):
    """Validate the metrics on known degradations: fewer steps, more merging, longer caches, blur, noise."""

    hidden: ClassVar[tuple[str, ...]] = (*RunSettings.hidden, "methods", "ratios", "fewer_steps")
    unused: ClassVar[tuple[str, ...]] = ("methods", "ratios", "fewer_steps")
    scheduler: SchedulerName = "dpm++karras"
    steps: Steps = 25
    reference_steps: ReferenceSteps = 100
    chain_steps: tuple[Annotated[int, Field(ge=1)], ...] = (50, 25, 12, 8, 6)
    """Numbers of steps, falling."""


class MediatorSettings(RunSettings):
    """Search when the number of pooled agents should grow: distance against MACs, drawn."""

    hidden: ClassVar[tuple[str, ...]] = (*RunSettings.hidden, "methods", "ratios")
    unused: ClassVar[tuple[str, ...]] = ("methods", "ratios")
    scheduler: SchedulerName = "ddpm"
    """Sampler. As the paper's, it adds noise; under a deterministic one latents don't move less and less."""
    counts: tuple[Annotated[int, Field(ge=1)], ...] = Field((16, 64, 256), min_length=1)
    """Agents in each stage, few first."""
    threshold_step: float = Field(0.25, gt=0, le=1)
    """Thresholds are tried at 1, 1 - step, ... 0 of the first distance; the paper's step is 0.1."""


class ProfileSettings(CostSettings):
    """Print where the time of one U-Net call goes, part by part, under each method."""

    hidden: ClassVar[tuple[str, ...]] = ("named", "scheduler", "steps")
    phases: tuple[Literal["early", "late"], ...] = ("early", "late")
    """early or late steps."""
    baseline: bool = True
    """Measure baseline too; at 2048 px that takes minutes a call."""
    out: Path = Path("outputs/profile")
    """Folder for profile.jsonl, .csv and .md."""


class PricedSettings(CostSettings):
    """Measure a whole run's seconds from one U-Net call of each kind, where a run would take an hour."""

    fewer_steps: FewerSteps = (0.8, 0.6, 0.4)
    out: Path = Path("outputs/priced")
    """Folder for latency.jsonl, .csv and .md."""


class RedundancySettings(ShowSettings):
    """Measure how alike the queries of each self-attention layer are at each step, and draw the map."""

    hidden: ClassVar[tuple[str, ...]] = ("named", "backend")
    measured_steps: int = Field(10, ge=1)
    """Steps that are measured, spread evenly from the first to the last; `steps` or more measures all."""
    exact_tokens: int = Field(1024, ge=0)
    """Layers of so many tokens at most are measured on all pairs of queries, the others on a sample."""
    pairs: int = Field(4096, ge=2)
    """Size of the sample for each layer, step and image, spread over the heads."""
    out: Path = Path("outputs/redundancy")
    """Folder for redundancy.png, .jsonl, .csv and .md."""


class DetailsSettings(CommandSettings):
    """Measure high-frequency energy, position, size and style of a table's images."""

    folder: Path
    """The folder of a table of the bundled toy model."""


class ComputedSettings(CommandSettings):
    """Count the peak memory of runs, and of DreamBooth's steps on SD 1.5, without allocating it."""

    has_config: ClassVar[bool] = False
    arch: Literal["sd15", "sdxl"] = "sd15"
    """Whose architecture."""
    sizes: tuple[Size, ...] = Field((512, 768, 1024), min_length=1)
    """Pixels on a side."""
    out: Path = Path("runs/computed-memory")
    """Folder for memory.jsonl, .csv and .md."""


class ModelledSettings(ComputedSettings):
    """Model the seconds of denoising on three GPUs, and check the model on this CPU."""

    out: Path = Path("runs/modelled-time")
    """Folder for time.jsonl, .csv and .md."""


class GpuSettings(CommandSettings):
    """Ask a GPU what is not known yet, in minutes: times, memory, the gpu tests, DreamBooth's peak."""

    has_config: ClassVar[bool] = False
    device: str | None = None
    """cuda, cuda:1, or cpu for a trial; else the first GPU."""
    tiny: bool = False
    """Tiny shapes, to try all stages."""
    seconds: float = Field(330, gt=0)
    """Limit of all; what would not fit is shortened, then left out."""
    beside: float = Field(130, ge=0)
    """Seconds after which tests and training, which run side by side at first, are ended."""
    start: str | None = None
    """The stage to begin with, by name; those before it are left out."""
    out: Path = Path("runs/gpu")
    """Folder for rows and logs."""
