"""Settings of every command: command line over YAML over the defaults that stand here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from agentsd import Recipe
from agentsd.recipe import MODES

from .errors import EvalError

Backend = Literal["sdpa", "unfused"]
Scheduler = Literal["model", "plms", "ddim", "ddpm", "euler", "dpm++"]
FeatureName = Literal["efficientnet-lite0", "inception"]
Ratio = Annotated[float, Field(ge=0, le=0.75)]
DType = Literal["float32", "float16", "bfloat16"]


class Settings(BaseModel):
    """What every command shares: a model and how it samples (Appendix B.2 of the paper where it speaks)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = "demo"
    """"demo" (embedded), a folder, or a hub id of a Stable Diffusion pipeline."""
    dtype: DType = "float32"
    device: str | None = None
    """None takes the first CUDA device, else the CPU."""
    backend: Backend = "sdpa"
    """Attention of the baseline, and of every layer that a method leaves alone."""
    scheduler: Scheduler = "plms"
    steps: int = Field(50, ge=1)
    guidance_scale: float = Field(7.5, ge=0)
    agent: dict[str, Any] = Field(default_factory=dict)
    """k, scale, early_frac and seed, as `agentsd.apply_agentsd` takes them."""
    named: dict[str, dict[str, Any] | Path] = Field(default_factory=dict)
    """More methods by a name of one's own: keywords of `agentsd.apply_agentsd`, with `recipe` as it stands in
    a recipe's file; or such a file, or a folder with trained attention. They have no ratio but their own."""
    cache_interval: int = Field(3, ge=1)
    """DeepCache runs the whole U-Net at every so many steps."""

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
            if "+" in name or not name.isprintable() or "/" in name:
                raise ValueError(f"the name {name!r} holds a '+', a '/' or a line break")
            if isinstance(settings, dict):
                recipe_of(settings)
            elif not settings.exists():
                raise ValueError(f"{name}: {settings} isn't there; make it first")
        return named


_DOOR = ("ratio", "k", "scale", "early_frac", "seed")


def recipe_of(settings: Mapping[str, Any]) -> Recipe:
    """The recipe that keywords of `agentsd.apply_agentsd` make; `recipe` is what a recipe's file holds.

    Raises ValueError for an unknown keyword or a bad value.
    """
    given = dict(settings)
    content, mode = given.pop("recipe", None), given.pop("mode", None)
    if unknown := sorted(set(given) - set(_DOOR)):
        raise ValueError(f"unknown {unknown}; known: {', '.join(sorted((*_DOOR, 'mode', 'recipe')))}")
    try:
        if content is not None:
            if given or mode is not None:
                raise ValueError(f"{sorted(settings)}: a recipe holds all settings: leave out the others")
            return Recipe.from_mapping({"version": 1} | content)
        if mode is not None and mode not in MODES:
            raise ValueError(f"mode={mode!r}: choose {' or '.join(map(repr, MODES))}")
        return MODES[mode or "fast"].with_settings(**given)
    except TypeError as error:
        raise ValueError(str(error)) from error


class SamplingSettings(Settings):
    """What the commands share that make pictures."""

    height: int | None = Field(None, ge=8, multiple_of=8)
    width: int | None = Field(None, ge=8, multiple_of=8)
    """Pixels; None takes the model's own size."""
    seed: int = Field(0, ge=0)
    """Picture i starts from the noise of seed + i, whatever the method, batch size or process."""


class CompareSettings(SamplingSettings):
    """Same-seed pictures of a few methods side by side (Fig. 6)."""

    methods: tuple[str, ...] = ("stock", "tomesd", "agentsd", "agentsd-fast")
    ratio: Ratio = 0.4
    prompts: tuple[str, ...] = ()
    """Empty takes `images` captions of the embedded model's reference pictures."""
    images: int = Field(6, ge=1)
    out: Path = Path("outputs/compare.png")


class RunSettings(SamplingSettings):
    """The pictures of a table or an ablation, what they are judged by, and where everything is kept."""

    methods: tuple[str, ...] = ("stock", "tomesd", "agentsd")
    ratios: tuple[Ratio, ...] = (0.1, 0.2, 0.3, 0.4, 0.5)
    """Table 10: every method at every ratio."""
    ablate_ratio: Ratio = 0.5
    ablate_values: tuple[float, ...] = ()
    """Tables 11 to 13: AgentSD at one ratio with one setting varied; empty takes the paper's values."""
    images: int = Field(64, ge=2)
    """Pictures for each row."""
    batch_size: int = Field(8, ge=1)
    prompts: Path | None = None
    """A text file, one prompt a line."""
    classes: Path | None = None
    """A text file, one class name a line, each asked for by `template` for `per_class` pictures."""
    template: str = "A high quality photograph of a {cls}."
    per_class: int = Field(2, ge=1)
    reference: Path | None = None
    """Folder of real pictures; None takes the embedded model's own, and for other models none."""
    features: FeatureName = "efficientnet-lite0"
    inception_weights: Path | None = None
    """pytorch-fid's weights; None lets pytorch-fid download them."""
    clip: str | None = None
    """Folder or hub id of a CLIP model, for the CLIP score."""
    count_on: int = Field(1, ge=1)
    """Multiply-adds are counted on so many pictures; they differ where the latent's distance decides."""
    bootstrap: int = Field(200, ge=2)
    out: Path = Path("runs/default")

    @field_validator("template")
    @classmethod
    def _names_the_class(cls, template: str) -> str:
        if "{cls}" not in template:
            raise ValueError("a template holds {cls}, where the class name goes")
        return template


class MediatorSettings(RunSettings):
    """The search over the latent-distance schedule of pooled agents."""

    scheduler: Scheduler = "ddpm"
    """As the paper's, it adds noise; under a deterministic one latents don't move less and less."""
    mediator_counts: tuple[Annotated[int, Field(ge=1)], ...] = Field((16, 64, 256), min_length=1)
    """Agents in each stage, few first."""
    mediator_step: float = Field(0.25, gt=0, le=1)
    """Thresholds are tried at 1, 1 - step, ... 0 of the first distance; the paper's step is 0.1."""


class CostSettings(Settings):
    """What the commands share that measure cost without looking at pictures."""

    arch: Literal["sd15", "sdxl"] | None = None
    """A bare architecture with random weights in place of `model`."""
    methods: tuple[str, ...] = ("stock", "tomesd", "agentsd", "agentsd-fast")
    ratio: Ratio = 0.4
    sizes: tuple[int, ...] = ()
    """Pixels on a side, multiples of 8; empty takes the model's own."""
    repeats: int = Field(5, ge=1)

    @field_validator("sizes")
    @classmethod
    def _whole_latents(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        if wrong := [size for size in sizes if size < 64 or size % 8]:
            raise ValueError(f"{wrong}: sizes are pixels, 64 or more and multiples of 8")
        return sizes


class LatencySettings(CostSettings):
    """Cost alone: seconds, multiply-adds and, on a GPU, memory."""

    backends: tuple[Backend, ...] = ("sdpa",)
    """Each method is measured under each of these, in place of `backend`."""
    batches: tuple[int, ...] = (1,)
    scopes: tuple[Literal["forward", "pipeline", "training"], ...] = ("forward", "pipeline")
    """One guided U-Net call in the early and in the late phase, a whole pipeline call, or a training step
    (forward and backward at an early timestep, without guidance and optimizer)."""
    gradient_checkpointing: bool = False
    """In training steps."""
    compile: bool = False
    """Compile the U-Net under every method, stock too."""
    out: Path = Path("outputs/latency")

    @field_validator("batches")
    @classmethod
    def _whole_batches(cls, batches: tuple[int, ...]) -> tuple[int, ...]:
        if wrong := [batch for batch in batches if batch < 1]:
            raise ValueError(f"{wrong}: a batch has 1 picture or more")
        return batches


class ProfileSettings(CostSettings):
    """Where the time of one U-Net call goes."""

    phases: tuple[Literal["early", "late"], ...] = ("early", "late")
    stock: bool = True
    """Measure stock too; at 2048 px that takes minutes a call."""
    out: Path = Path("outputs/profile")


class RedundancySettings(SamplingSettings):
    """How alike the queries of each self-attention layer are at each step (Pu et al. 2024, Fig. 1)."""

    prompts: tuple[str, ...] = ()
    """Empty takes `images` captions of the embedded model's reference pictures."""
    images: int = Field(4, ge=1)
    measured_steps: int = Field(10, ge=1)
    """Steps that are measured, spread evenly from the first to the last; `steps` or more measures all."""
    exact_tokens: int = Field(1024, ge=0)
    """Layers of so many tokens at most are measured on all pairs of queries, the others on a sample."""
    pairs: int = Field(4096, ge=2)
    """Size of the sample for each layer, step and picture, spread over the heads."""
    out: Path = Path("outputs/redundancy")


class CalibrateSettings(SamplingSettings):
    """The search for what each self-attention layer should run; one goal, `speedup` or `max_error`."""

    prompts: tuple[str, ...] = ()
    """Empty takes `images` captions of the embedded model's reference pictures."""
    images: int = Field(3, ge=1)
    speedup: float | None = Field(None, gt=1)
    max_error: float | None = Field(None, gt=0)
    cost: Literal["time", "multiply_adds"] = "time"
    calls: int = Field(6, ge=1)
    """U-Net calls of each prompt's run that are measured, evenly spread."""
    out: Path = Path("outputs/calibrated.yaml")

    @model_validator(mode="after")
    def _one_goal(self) -> "CalibrateSettings":
        if (self.speedup is None) == (self.max_error is None):
            raise ValueError(
                "give one goal: --speedup, for instance 1.15, or --max-error, for instance 0.001"
            )
        return self


class SubjectSettings(SamplingSettings):
    """A subject that the model never saw, taught to it with DreamBooth (Fig. 8, appendix B.4).

    Sized for the embedded model; the paper trains SD 1.5 at a constant 1e-6, and takes 100 DDIM steps.
    """

    scheduler: Scheduler = "ddim"
    steps: int = Field(20, ge=1)
    ratio: Ratio = 0.4
    subject: Path | None = None
    """Folder of the subject's pictures, 2 or more; None takes the embedded one."""
    instance_prompt: str = "an emoji of a sks face"
    class_prompt: str = "an emoji of a face"
    train_steps: int = Field(800, ge=1)
    learning_rate: float = Field(2e-4, gt=0)
    lr_scheduler: Literal["constant", "linear", "cosine"] = "cosine"
    """The paper's is constant; a small model at batch 1 ends better where the last steps are small."""
    subject_guidance_scale: float = Field(2.5, ge=0)
    """Guidance of the subject's pictures; `guidance_scale` is that of the other prompts. The embedded model's
    captions are distilled so that 7.5 does what 2.5 did, but not what is taught to it afterwards."""
    class_images: int = Field(16, ge=1)
    """Pictures of the class that prior preservation trains on, made by the model before its training."""
    images: int = Field(8, ge=2)
    """Pictures of the subject for each row."""
    other_prompts: int = Field(16, ge=2)
    """Captions that the model was trained on, one picture each for each row."""
    out: Path = Path("runs/subject")

    @field_validator("agent")
    @classmethod
    def _of_the_training(cls, agent: dict[str, Any]) -> dict[str, Any]:
        if unknown := sorted(set(agent) - {"k", "scale"}):
            raise ValueError(f"{unknown} can't be trained with; known: k, scale")
        return agent


class FidSettings(BaseModel):
    """Two folders of pictures."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    features: FeatureName = "inception"
    inception_weights: Path | None = None
    cache: Path = Path("outputs/features")
    device: str | None = None


_INPUT_FILES = {"prompts", "classes", "reference", "inception_weights", "subject"}
SettingsT = TypeVar("SettingsT", bound=BaseModel)


def load_settings(kind: type[SettingsT], path: Path | None, overrides: Mapping[str, Any]) -> SettingsT:
    """Return settings from a YAML file with `overrides` on top; overrides that are None don't count.

    Files named in the YAML are looked for beside it.
    Raises EvalError naming each wrong key or value.
    """
    values = _read_yaml(path) if path else {}
    for key in _INPUT_FILES & set(values):
        if isinstance(values[key], str) and path:
            values[key] = path.parent / values[key]
    for name, settings in (values.get("named") or {}).items():
        if isinstance(settings, str) and path:
            values["named"][name] = path.parent / settings
    given = {key: value for key, value in overrides.items() if value is not None}
    if "agent" in given:
        given["agent"] = {**values.get("agent", {}), **given["agent"]}
    try:
        return kind.model_validate({**values, **given})
    except ValidationError as error:
        raise EvalError(_explain(kind, path, error)) from None


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EvalError(f"can't read the configuration {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise EvalError(f"{path} is not valid YAML: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise EvalError(f"{path} must hold `key: value` lines; it holds a {type(values).__name__}")
    return values


def _explain(kind: type[BaseModel], path: Path | None, error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            lines.append(f"unknown key {key!r}; known keys: {', '.join(kind.model_fields)}")
        else:
            # Of a mapping the message names the part that is wrong.
            value = "" if isinstance(problem["input"], dict) else f" = {problem['input']!r}"
            place = f"{key}{value}: " if key else ""
            lines.append(place + problem["msg"].removeprefix("Value error, "))
    where = f" in {path} and the command line" if path else ""
    return f"wrong settings{where}:\n  " + "\n  ".join(lines)
