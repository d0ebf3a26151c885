"""The settings of every command: each field's default, help, option and YAML key stand here, once.

The command line is made of them (`cli.py`). Nothing heavy is imported before a setting is checked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from .names import is_method

if TYPE_CHECKING:
    from agentsd import Recipe

Backend = Literal["sdpa", "unfused"]
Scheduler = Literal["model", "plms", "ddim", "ddpm", "euler", "dpm++", "dpm++karras"]
FeatureName = Literal["efficientnet-lite0", "inception"]
Ratio = Annotated[float, Field(ge=0, le=0.75)]
DType = Literal["float32", "float16", "bfloat16"]


@dataclass(frozen=True)
class Option:
    """How a field is called on the command line where its own name doesn't do; positional: an argument."""

    name: str
    positional: bool = False


OneRatio = Annotated[Ratio, Field(description="Share of the tokens that is merged.")]
Methods = Annotated[
    tuple[str, ...],
    Option("method"),
    Field(
        description="baseline, a mode (agentsd, downsample, step-caching, paper), tomesd, todo, deepcache "
        "(deepcache-5: interval 5), or two joined: paper+deepcache; METHOD@STEPS runs so many steps; limit "
        "(limit-all): without the finest level's (every) self-attention core, for its cost alone; repeat."
    ),
]
FewerSteps = Annotated[
    tuple[Annotated[float, Field(gt=0, lt=1)], ...],
    Field(
        description="Rows of the baseline in so large a share of the steps: what a method must beat; repeat, "
        "or none."
    ),
]
Prompts = Annotated[
    tuple[str, ...],
    Option("prompt"),
    Field(
        description="A prompt; repeat. Without one, `images` captions of the embedded model, or prompts that "
        "ship with the program."
    ),
]


class CommandSettings(BaseModel):
    """The settings of a command; those that are `hidden` have no option, but may stand in its YAML."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
    hidden: ClassVar[tuple[str, ...]] = ()
    unused: ClassVar[tuple[str, ...]] = ()
    """Settings of the class above that the command has no use for, and refuses in a YAML file."""


class Settings(CommandSettings):
    """What every command shares: a model and how it samples (Appendix B.2 of the paper where it speaks)."""

    model: str = "demo"
    """demo (embedded), a folder, or a hub id of a Stable Diffusion pipeline."""
    dtype: DType = "float32"
    """The model's numbers."""
    device: str | None = None
    """cpu, cuda, cuda:1 ...; without it the first CUDA device, else the CPU."""
    backend: Backend = "sdpa"
    """Attention of the baseline, and of every layer that a method leaves alone."""
    scheduler: Scheduler = "plms"
    """The sampler; model is the model's own."""
    steps: int = Field(50, ge=1, le=1000)
    """Denoising steps."""
    guidance_scale: Annotated[float, Option("guidance")] = Field(7.5, ge=0)
    """Guidance scale; 1 or less turns it off."""
    agent: dict[str, Any] = Field(default_factory=dict)
    """k, scale, early_frac or seed of the methods that have it, such as k=0.05; repeat."""
    named: dict[str, dict[str, Any] | Path] = Field(default_factory=dict)
    """More methods by a name of one's own: keywords of `agentsd.apply_agentsd`, with `recipe` as it stands in
    a recipe's file; or such a file, or a folder with trained attention. They have no ratio but their own."""

    @field_validator("agent")
    @classmethod
    def _known_agent_settings(cls, agent: dict[str, Any]) -> dict[str, Any]:
        if "ratio" in agent:
            raise ValueError("the ratio is an option of its own")
        if named := sorted({"mode", "recipe"} & set(agent)):
            raise ValueError(f"{named[0]} is chosen by a method's name")
        recipe_of(agent)
        return agent

    @field_validator("named")
    @classmethod
    def _known_named_settings(cls, named: dict[str, dict[str, Any] | Path]) -> dict[str, Any]:
        for name, settings in named.items():
            if set("+/@") & set(name) or not name.isprintable() or not name:
                raise ValueError(f"the name {name!r} is empty or holds a '+', a '/', an '@' or a line break")
            if is_method(name):
                raise ValueError(f"{name!r} is a method already: choose another name")
            if isinstance(settings, dict):
                recipe_of(settings)
            elif not settings.exists():
                raise ValueError(f"{name}: {settings} isn't there; make it first")
        return named


_DOOR = ("ratio", "k", "scale", "early_frac", "seed")
_LARGEST = 3.4e38  # of the 32-bit floats that tensors hold


def recipe_of(settings: Mapping[str, Any]) -> Recipe:
    """The recipe that keywords of `agentsd.apply_agentsd` make; `recipe` is what a recipe's file holds.

    Raises ValueError for an unknown keyword or a bad value.
    """
    from agentsd import Recipe
    from agentsd.recipe import MODES

    given = dict(settings)
    content, mode = given.pop("recipe", None), given.pop("mode", None)
    if unknown := sorted(map(str, set(given) - set(_DOOR))):
        raise ValueError(f"unknown {unknown}; known: {', '.join(sorted((*_DOOR, 'mode', 'recipe')))}")
    for name, value in given.items():
        if (
            isinstance(value, int | float)
            and math.isfinite(value)
            and abs(value) > _LARGEST
            and name != "seed"
        ):
            raise ValueError(f"{name}={value!r} is beyond a 32-bit float: pass a smaller number")
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
    """What the commands share that make pictures."""

    height: int | None = Field(None, ge=8, multiple_of=8)
    """Pixels, a multiple of 8; without it the model's own."""
    width: int | None = Field(None, ge=8, multiple_of=8)
    """Pixels, a multiple of 8; without it the model's own."""
    seed: int = Field(0, ge=0, lt=2**62)
    """Picture i starts from the noise of seed + i, whatever the method, batch size or process."""


class ShowSettings(SamplingSettings):
    """What the commands share that take single prompts."""

    prompts: Prompts = ()
    images: int = Field(4, ge=1)
    """How many prompts, where none is given."""


class CompareSettings(ShowSettings):
    """Make the same pictures with each method, side by side in one PNG, and print times and differences."""

    scheduler: Scheduler = "dpm++karras"
    """The sampler; model is the model's own."""
    steps: int = Field(25, ge=1, le=1000)
    """Denoising steps."""
    guidance_scale: Annotated[float, Option("guidance")] = Field(4.0, ge=0)
    """Guidance scale; 1 or less turns it off."""
    methods: Methods = ("baseline", "tomesd", "paper", "agentsd")
    fewer_steps: FewerSteps = (0.6,)
    ratio: OneRatio = 0.4
    images: int = Field(6, ge=1)
    """How many prompts, where none is given."""
    out: Path = Path("outputs/compare.png")
    """The PNG to write."""


class AppSettings(SamplingSettings):
    """Serve a page in the browser: baseline and a recipe side by side, from one seed."""

    hidden: ClassVar[tuple[str, ...]] = ("backend", "agent")
    scheduler: Scheduler = "dpm++karras"
    """The sampler that the page begins with; model is the model's own."""
    steps: int = Field(25, ge=1, le=1000)
    """Denoising steps that it begins with."""
    guidance_scale: Annotated[float, Option("guidance")] = Field(4.0, ge=0)
    """Guidance scale that it begins with; 1 or less turns it off."""
    prompt: str | None = None
    """The prompt that it begins with; without it a caption of the embedded model."""
    recipe: str = "agentsd"
    """The recipe that it begins with: agentsd, downsample, step-caching or paper."""
    host: str = "127.0.0.1"
    """The address that it listens on: this machine alone; 0.0.0.0 is every network that it is in."""
    port: int | None = Field(None, ge=1, le=65535)
    """The port; without it the first free one from 7860 on."""

    @field_validator("recipe")
    @classmethod
    def _known_recipe(cls, recipe: str) -> str:
        recipe_of({"mode": recipe})
        return recipe


class RunSettings(SamplingSettings):
    """Make pictures with each method and ratio, and a row of quality and cost for each (Table 10)."""

    hidden: ClassVar[tuple[str, ...]] = ("ablate_ratio", "ablate_values")
    methods: Methods = ("baseline", "tomesd", "paper", "agentsd")
    fewer_steps: FewerSteps = (0.8, 0.6, 0.4)
    ratios: Annotated[tuple[Ratio, ...], Option("ratio")] = (0.1, 0.2, 0.3, 0.4, 0.5)
    """Share of the tokens that is merged: every method at every ratio; repeat."""
    ablate_ratio: Annotated[Ratio, Option("ratio")] = 0.5
    """Share of the tokens that is merged."""
    ablate_values: Annotated[tuple[float, ...], Option("value")] = ()
    """A value to try; repeat. Without one, the paper's."""
    images: int = Field(64, ge=2)
    """Pictures for each row."""
    limit: int | None = Field(None, ge=2)
    """A trial of the whole run on so many images a row, and as many real ones, in a folder of its own
    (OUT-limit-N)."""
    batch_size: int = Field(8, ge=1)
    """Pictures made at once; a run may go on with another number."""
    prompts: Path | None = None
    """A text file, one prompt a line; without it, and for the embedded model, its captions."""
    classes: Path | None = None
    """A text file, one class name a line, each asked for by `template` for `per_class` pictures."""
    template: str = "A high quality photograph of a {cls}."
    """The prompt for a class."""
    per_class: int = Field(2, ge=1)
    """Pictures for each class."""
    reference: Path | None = None
    """A folder of real pictures; without it the embedded model's own, and for other models none."""
    references: int = Field(4096, ge=8)
    """Fresh scenes that the embedded model's pictures are compared with."""
    reference_steps: int | None = Field(None, ge=2)
    """Steps of the baseline's reference images, such as 100, that every row is compared with; without it,
    rows are
    compared with the baseline's pictures alone."""
    other_seeds: bool = False
    """Compare rows with the baseline's own pictures of the same prompts under other seeds, too."""
    features: FeatureName = "efficientnet-lite0"
    """The network that distances are measured by; inception is that of real FID."""
    inception_weights: Path | None = None
    """pytorch-fid's weights file; without it, pytorch-fid downloads it."""
    clip: str | None = None
    """A CLIP model (folder or hub id) for the CLIP score."""
    count_on: int = Field(1, ge=1)
    """MACs are counted on so many pictures; they differ where the latent's distance decides."""
    bootstrap: int = Field(200, ge=2)
    """Resamples for the error of a distance."""
    out: Path = Path("runs/default")
    """The run's folder; the same folder resumes it."""

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

    @field_validator("template")
    @classmethod
    def _names_the_class(cls, template: str) -> str:
        if "{cls}" not in template:
            raise ValueError("a template holds {cls}, where the class name goes")
        return template


class AblateSettings(RunSettings):
    """Vary one setting of mode paper at one ratio, beside baseline (Tables 11, 12 and 13)."""

    hidden: ClassVar[tuple[str, ...]] = ("methods", "ratios")
    what: Annotated[Literal["k", "scale", "early"], Option("WHAT", positional=True)]
    """k (Table 11), scale (Table 12) or early (Table 13)."""


class CheckSettings(RunSettings):
    """Check the recipes on your own model: baseline, fewer steps and each recipe; a page, and results to
    send.

    Without --prompts, other models than the embedded one get prompts that ship with the program.
    """

    hidden: ClassVar[tuple[str, ...]] = ("ratios", "ablate_ratio", "ablate_values", "fewer_steps")
    scheduler: Scheduler = "dpm++karras"
    """A deterministic sampler, so that many steps converge; model is the model's own."""
    steps: int = Field(25, ge=1, le=1000)
    """Denoising steps."""
    methods: Methods = ("agentsd", "downsample", "step-caching")
    ratios: Annotated[tuple[Ratio, ...], Option("ratio")] = (0.4,)
    fewer_steps: FewerSteps = (0.8, 0.6, 0.4)
    calibrated: tuple[Path, ...] = ()
    """A recipe's file that `calibrate` wrote; repeat."""
    images: int = Field(32, ge=2)
    """Pictures for each row."""
    batch_size: int = Field(4, ge=1)
    """Pictures made at once."""
    reference_steps: int | None = Field(100, ge=2)
    """Steps of the baseline's reference images, that every row is compared with."""
    out: Path = Path("runs/check")
    """The run's folder; the same folder resumes it."""

    @field_validator("calibrated")
    @classmethod
    def _of_other_names(cls, calibrated: tuple[Path, ...]) -> tuple[Path, ...]:
        if missing := [str(path) for path in calibrated if not path.exists()]:
            raise ValueError(f"{missing[0]} isn't there; agentsd-eval calibrate makes one")
        names = [path.stem for path in calibrated]
        if twice := [name for name in names if names.count(name) > 1 or is_method(name)]:
            raise ValueError(f"{twice[0]!r} is the name of another row: rename the file")
        return calibrated


class CostSettings(Settings):
    """What the commands share that measure cost without looking at pictures."""

    arch: Literal["sd15", "sdxl"] | None = None
    """A bare architecture with random weights in place of a model."""
    methods: Methods = ("baseline", "tomesd", "paper", "agentsd", "downsample", "step-caching")
    ratio: OneRatio = 0.4
    sizes: Annotated[tuple[int, ...], Option("size")] = ()
    """Pixels on a side, multiples of 8; repeat. Without one, the model's own."""
    repeats: int = Field(5, ge=1)
    """Timed rounds; the median counts."""

    @field_validator("sizes")
    @classmethod
    def _whole_latents(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        if wrong := [size for size in sizes if size < 64 or size % 8]:
            raise ValueError(f"{wrong}: sizes are pixels, 64 or more and multiples of 8")
        return sizes


class LatencySettings(CostSettings):
    """Measure cost alone: seconds, MACs and, on a GPU, memory; the methods take turns."""

    hidden: ClassVar[tuple[str, ...]] = ("backend",)
    fewer_steps: FewerSteps = (0.8, 0.6, 0.4)
    backends: Annotated[tuple[Backend, ...], Option("backend")] = ("sdpa",)
    """Attention of the baseline and of layers left alone: each method is measured under each; repeat."""
    batches: Annotated[tuple[int, ...], Option("batch")] = (1,)
    """Pictures at once; repeat."""
    scopes: Annotated[tuple[Literal["forward", "pipeline", "priced", "training"], ...], Option("scope")] = (
        "forward",
        "pipeline",
    )
    """One guided U-Net call in the early and in the later phase (forward), a whole run (pipeline), a whole
    run from one call of each kind (priced), or a training step (training): forward and backward at an early
    timestep, without guidance and optimizer; repeat."""
    gradient_checkpointing: bool = False
    """In training steps."""
    compile: bool = False
    """Compile the U-Net under every method, baseline too."""
    count: bool = True
    """Count MACs, in a warm-up round before the timed ones; runs of minutes can do without."""
    out: Path = Path("outputs/latency")
    """Folder for latency.jsonl, .csv and .md."""

    @field_validator("batches")
    @classmethod
    def _whole_batches(cls, batches: tuple[int, ...]) -> tuple[int, ...]:
        if wrong := [batch for batch in batches if batch < 1]:
            raise ValueError(f"{wrong}: a batch has 1 picture or more")
        return batches


class CalibrateSettings(ShowSettings):
    """Find the recipe that meets a goal, among the named ones and variations, on your model and prompts."""

    hidden: ClassVar[tuple[str, ...]] = ("agent",)
    steps: int = Field(25, ge=1, le=1000)
    """Denoising steps."""
    images: int = Field(3, ge=1)
    """How many prompts, where none is given."""
    held_out: int = Field(0, ge=0)
    """How many of the prompts, the last ones, are kept for measuring what the recipe promises."""
    reference_steps: int | None = Field(None, ge=2)
    """Steps of reference runs, such as 100, by which the recipe is compared with fewer steps; without it they
    are compared by the baseline's own latents."""
    speedup: float | None = Field(None, gt=1)
    """The goal: how much cheaper the U-Net's calls of a run."""
    max_distance: float | None = Field(None, gt=0)
    """Or the goal: the largest distance of a run's final latents to the baseline's, such as 0.05."""
    cost: Literal["macs", "seconds"] = "macs"
    """What is to become cheaper; seconds need a machine that does nothing else."""
    out: Path = Path("outputs/calibrated.yaml")
    """The YAML file to write; what was measured is kept beside it (.jsonl), and the same command goes on."""

    @model_validator(mode="after")
    def _one_goal(self) -> CalibrateSettings:
        if (self.speedup is None) == (self.max_distance is None):
            raise ValueError(
                "give one goal: --speedup, for instance 1.8, or --max-distance, for instance 0.05"
            )
        if self.held_out >= (count := len(self.prompts) or self.images):
            raise ValueError(f"held_out={self.held_out} of {count} prompts: leave one to calibrate on")
        return self


class SubjectSettings(SamplingSettings):
    """Teach the model a subject with and without agent attention, and compare how it draws it (Fig. 8).

    Sized for the embedded model; the paper (appendix B.4) trains SD 1.5 at a constant 1e-6, and takes 100
    DDIM steps.
    """

    scheduler: Scheduler = "ddim"
    """The sampler; model is the model's own."""
    steps: int = Field(20, ge=1, le=1000)
    """Denoising steps."""
    ratio: OneRatio = 0.4
    subject: Path | None = None
    """Folder of the subject's pictures, 2 or more; without it the embedded one."""
    instance_prompt: str = "an emoji of a sks face"
    """The prompt that the subject is taught under."""
    class_prompt: str = "an emoji of a face"
    """The prompt whose pictures preserve the prior."""
    train_steps: int = Field(800, ge=1)
    """Training steps of each finetuning, at batch 1."""
    learning_rate: float = Field(2e-4, gt=0)
    """Learning rate of each finetuning."""
    lr_scheduler: Literal["constant", "linear", "cosine"] = "cosine"
    """The paper's is constant; a small model at batch 1 ends better where the last steps are small."""
    subject_guidance_scale: Annotated[float, Option("subject-guidance")] = Field(2.5, ge=0)
    """Guidance of the subject's pictures; `guidance_scale` is that of the other prompts. The embedded model's
    captions are distilled so that 7.5 does what 2.5 did, but not what is taught to it afterwards."""
    class_images: int = Field(16, ge=1)
    """Pictures of the class that prior preservation trains on, made by the model before its training."""
    images: int = Field(8, ge=2)
    """Pictures of the subject for each row."""
    other_prompts: int = Field(16, ge=2)
    """Other prompts, one picture each for each row: captions that the embedded model was trained on; for
    other models prompts that ship with the program."""
    clip: str | None = None
    """A CLIP model (folder or hub id) for CLIP-I and CLIP-T."""
    dino: str | None = None
    """A DINO model (folder or hub id, such as facebook/dino-vits16) for the DINO score."""
    out: Path = Path("runs/subject")
    """The run's folder; the same folder resumes it."""

    @model_validator(mode="after")
    def _own_subject(self) -> SubjectSettings:
        asked = ("subject", "instance_prompt", "class_prompt")
        if self.model != "demo" and (missing := [key for key in asked if key not in self.model_fields_set]):
            option = missing[0].replace("_", "-")
            raise ValueError(
                f"{missing[0]}: the embedded subject is for the embedded model; give --{option}, as in "
                "--subject FOLDER --instance-prompt 'a photo of a sks dog' --class-prompt 'a photo of a dog'"
            )
        return self

    @field_validator("agent")
    @classmethod
    def _of_the_training(cls, agent: dict[str, Any]) -> dict[str, Any]:
        if unknown := sorted(set(agent) - {"k", "scale"}):
            raise ValueError(f"{unknown} can't be trained with; known: k, scale")
        return agent


class ReportSettings(CommandSettings):
    """Write one self-contained HTML page: gain and loss, pictures under a slider, plots, tables."""

    folder: Annotated[Path, Option("RUN_DIR", positional=True)]
    """A run's folder."""
    pictures: int = Field(12, ge=1)
    """How many seeds' pictures are shown."""
