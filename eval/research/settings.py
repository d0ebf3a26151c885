"""The settings of the studies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from ..settings import (
    CommandSettings,
    CostSettings,
    FewerSteps,
    ReferenceSteps,
    RunSettings,
    SchedulerName,
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
    out: Path = Path("outputs/priced")
    """Folder for latency.jsonl, .csv and .md."""


class ComputedSettings(CommandSettings):
    """Count the peak memory of runs of SD 1.5 and SDXL without allocating it."""

    out: Path = Path("runs/computed-memory")
    """Folder for memory.jsonl, .csv and .md."""


class GpuSettings(CommandSettings):
    """Ask a GPU what is not known yet, in minutes: times, memory, the gpu tests, DreamBooth's peak."""

    device: str | None = None
    """cuda, cuda:1, or cpu for a trial; else the first GPU."""
    tiny: bool = False
    """Tiny shapes, to try all stages."""
    seconds: float = Field(230, gt=0)
    """Limit of all; what would not fit is shortened, then left out."""
    beside: float = Field(90, ge=0)
    """Seconds after which tests and training, which run side by side at first, are ended."""
    start: str | None = None
    """The stage to begin with, by name; those before it are left out."""
    out: Path = Path("runs/gpu")
    """Folder for rows and logs."""
