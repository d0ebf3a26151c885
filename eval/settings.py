"""The settings of every command: each field is an option, a YAML key and a name in errors and run.json.

The command line is made of them (`options.py`): the first sentence of a docstring is an option's help.
Nothing heavy is imported before a setting is checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from .names import is_method

if TYPE_CHECKING:
    from agentsd import Recipe

Backend = Literal["sdpa", "unfused"]
Scheduler = Literal["model", "plms", "ddim", "ddpm", "euler", "dpm++", "dpm++karras"]
FeatureName = Literal["efficientnet-lite0", "inception"]
Scope = Literal["forward", "pipeline", "training"]
Ratio = Annotated[float, Field(ge=0, le=0.75)]
DType = Literal["float32", "float16", "bfloat16"]
OneRatio = Annotated[Ratio, Field(description="Share of the tokens that is merged.")]
Methods = Annotated[
    tuple[str, ...],
    Field(
        description="Rows: a mode, tomesd, todo, deepcache-N, METHOD@STEPS, two joined by +. The modes are "
        "agentsd, downsample, step-caching and paper; no-attention and no-attention-all leave out "
        "self-attention's core at the finest and at every level, an upper bound on speed."
    ),
]
FewerSteps = Annotated[
    tuple[Annotated[float, Field(gt=0, lt=1)], ...],
    Field(description="Rows of the baseline in these shares of the steps."),
]
Steps = Annotated[int, Field(ge=1, le=1000, description="Denoising steps.")]
Guidance = Annotated[float, Field(ge=0, description="Guidance scale; 1 or less turns it off.")]
SchedulerName = Annotated[Scheduler, Field(description=f"Sampler: {', '.join(Scheduler.__args__)}.")]
ReferenceSteps = Annotated[
    int | None,
    Field(
        ge=2,
        description="Steps of the baseline's reference images. Every row is compared with them; without them "
        "rows are compared with the baseline's images alone.",
    ),
]


class CommandSettings(BaseModel):
    """The settings of a command."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
    hidden: ClassVar[tuple[str, ...]] = ("named",)
    """Settings without an option; YAML may hold them."""
    unused: ClassVar[tuple[str, ...]] = ()
    """Settings of the class above that the command refuses in YAML."""
    has_config: ClassVar[bool] = False
    """Whether a preset or a YAML file may set it up."""
    resumes: ClassVar[bool] = False
    """Whether the command goes on where it was stopped."""


class Settings(CommandSettings):
    """What every command shares: a model and how it samples (Appendix B.2 of the paper where it speaks)."""

    has_config: ClassVar[bool] = True
    model: str = "demo"
    """demo (the toy model), a folder, or a hub id."""
    dtype: DType = "float32"
    """The model's numbers: float32, float16, bfloat16."""
    device: str | None = None
    """cpu, cuda, cuda:1; else the first GPU, or the CPU."""
    backend: Backend = "sdpa"
    """Attention of layers that a method leaves alone."""
    scheduler: SchedulerName = "plms"
    steps: Steps = 50
    guidance_scale: Guidance = 7.5
    named: dict[str, dict[str, Any] | Path] = Field(default_factory=dict)
    """More methods by a name of your own: keywords of `agentsd.apply_agentsd`, with `recipe` as it stands in
    a recipe's file; or such a file, or a folder with trained attention. They have no ratio but their own."""

    @field_validator("named")
    @classmethod
    def _known_named_settings(cls, named: dict[str, dict[str, Any] | Path]) -> dict[str, Any]:
        for name, settings in named.items():
            if set("+/@,") & set(name) or not name.isprintable() or not name:
                raise ValueError(f"the name {name!r} is empty or holds a line break or one of + / @ ,")
            if is_method(name):
                raise ValueError(f"{name!r} is a method already: choose another name")
            if isinstance(settings, dict):
                recipe_of(settings)
            elif not settings.exists():
                raise ValueError(f"{name}: {settings} isn't there; make it first")
        return named


_KEYWORDS = ("ratio", "k", "scale", "early_frac", "seed")


def recipe_of(settings: Mapping[str, Any]) -> Recipe:
    """Return the recipe that keywords of `agentsd.apply_agentsd` make; `recipe` is what a recipe's file
    holds.

    Raises ValueError for an unknown keyword or a bad value.
    """
    from agentsd import Recipe
    from agentsd.recipe import MODES

    given = dict(settings)
    content, mode = given.pop("recipe", None), given.pop("mode", None)
    if unknown := sorted(map(str, set(given) - set(_KEYWORDS))):
        raise ValueError(f"unknown {unknown}; known: {', '.join(sorted((*_KEYWORDS, 'mode', 'recipe')))}")
    try:
        if content is not None:
            if given or mode is not None:
                raise ValueError(f"{sorted(settings)}: a recipe holds all settings: leave out the others")
            if not isinstance(content, dict):
                raise ValueError(f"recipe={content!r}: write what a recipe's file holds")
            return Recipe.from_mapping({"version": 1} | content)
        if mode is not None and mode not in MODES:
            raise ValueError(f"mode={mode!r}: choose {' or '.join(map(repr, MODES))}")
        return MODES[mode or "agentsd"].with_settings(**given)
    except TypeError as error:
        raise ValueError(str(error)) from error


class SamplingSettings(Settings):
    """What the commands share that make images."""

    height: int | None = Field(None, ge=8, multiple_of=8)
    """Pixels, a multiple of 8; else the model's own."""
    width: int | None = Field(None, ge=8, multiple_of=8)
    """Pixels, a multiple of 8; else the model's own."""
    seed: int = Field(0, ge=0, lt=2**62)
    """Image i starts from the noise of seed + i. So it is whatever the method, batch size or process."""


class ShowSettings(SamplingSettings):
    """What the commands share that take single prompts."""

    prompt: tuple[str, ...] = ()
    """A prompt; repeat. Without one, `images` captions of the toy model, or prompts that ship for other
    models."""
    images: int = Field(4, ge=1)
    """How many prompts, where none is given."""


class CompareSettings(ShowSettings):
    """Make the same images with each method, side by side in one PNG, and print times and differences."""

    scheduler: SchedulerName = "dpm++karras"
    steps: Steps = 25
    guidance_scale: Guidance = 4.0
    methods: Methods = ("baseline", "tomesd", "paper", "agentsd")
    fewer_steps: FewerSteps = (0.6,)
    ratio: OneRatio = 0.4
    images: int = Field(6, ge=1)
    """How many prompts, where none is given."""
    out: Path = Path("outputs/compare.png")
    """The PNG to write."""


class AppSettings(SamplingSettings):
    """Serve a page in the browser: baseline and a recipe side by side, from one seed."""

    hidden: ClassVar[tuple[str, ...]] = ("named", "backend")
    scheduler: SchedulerName = "dpm++karras"
    steps: Steps = 25
    guidance_scale: Guidance = 4.0
    prompt: str | None = None
    """The prompt that the page begins with."""
    recipe: str = "agentsd"
    """The recipe that the page begins with: a mode."""
    host: str = "127.0.0.1"
    """The address that it listens on. 127.0.0.1 is this machine alone; 0.0.0.0 is every network it is in."""
    port: int | None = Field(None, ge=1, le=65535)
    """The port; else the first free one from 7860 on."""

    @field_validator("recipe")
    @classmethod
    def _known_recipe(cls, recipe: str) -> str:
        recipe_of({"mode": recipe})
        return recipe


class CostSettings(Settings):
    """What the commands share that measure cost without looking at images."""

    arch: Literal["sd15", "sdxl"] | None = None
    """A bare architecture with random weights in place of a model."""
    methods: Methods = ("baseline", "tomesd", "paper", "agentsd", "downsample", "step-caching")
    ratio: OneRatio = 0.4
    sizes: tuple[Annotated[int, Field(ge=64, multiple_of=8)], ...] = ()
    """Pixels on a side, multiples of 8; else the model's own."""
    repeats: int = Field(5, ge=1)
    """Timed rounds; the median counts."""


class LatencySettings(CostSettings):
    """Measure cost alone: seconds, MACs and, on a GPU, memory; the methods take turns."""

    hidden: ClassVar[tuple[str, ...]] = ("named", "backend")
    fewer_steps: FewerSteps = (0.8, 0.6, 0.4)
    backends: tuple[Backend, ...] = ("sdpa",)
    """Attention of the baseline and of layers left alone. Each method is measured under each."""
    batches: tuple[Annotated[int, Field(ge=1)], ...] = (1,)
    """Images at once."""
    scopes: tuple[Scope, ...] = ("forward", "pipeline")
    """What is timed: forward, pipeline, training. forward is one guided U-Net call in the early and in the
    later phase, pipeline a whole run, training a forward and backward pass at an early timestep, without
    guidance and optimizer."""
    compile: bool = False
    """Compile the U-Net under every method, baseline too."""
    count: bool = True
    """Count MACs, in a warm-up round. Runs of minutes can do without."""
    out: Path = Path("outputs/latency")
    """Folder for latency.jsonl, .csv and .md."""


class CalibrateSettings(ShowSettings):
    """Find the recipe that meets a goal, among the named ones and variations, on your model and prompts."""

    resumes: ClassVar[bool] = True
    steps: Steps = 25
    images: int = Field(3, ge=1)
    """How many prompts, where none is given."""
    held_out: int = Field(0, ge=0)
    """How many prompts, the last ones, are kept for validation."""
    reference_steps: ReferenceSteps = None
    speedup: float | None = Field(None, gt=1)
    """The goal: how much cheaper the U-Net's calls of a run."""
    max_distance: float | None = Field(None, gt=0)
    """Or the goal: the largest distance of final latents. It is the latent relative RMSE to the baseline's,
    such as 0.05."""
    cost: Literal["macs", "seconds"] = "macs"
    """What is to become cheaper. Seconds need a machine that does nothing else."""
    out: Path = Path("outputs/calibrated.yaml")
    """The YAML file to write. What was measured is kept beside it (.jsonl), and the same command goes on."""

    @model_validator(mode="after")
    def _one_goal(self) -> CalibrateSettings:
        if (self.speedup is None) == (self.max_distance is None):
            raise ValueError(
                "give one goal: --speedup, for instance 1.8, or --max-distance, for instance 0.05"
            )
        if self.held_out >= (count := len(self.prompt) or self.images):
            raise ValueError(f"held_out={self.held_out} of {count} prompts: leave one to calibrate on")
        return self


class ReportSettings(CommandSettings):
    """Write one self-contained HTML page: gain and loss, images under a slider, plots, tables."""

    folder: Path
    """A run's folder."""
    images: int = Field(12, ge=1)
    """How many seeds' images are shown."""
