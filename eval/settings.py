"""The settings of every command: each field is an option, a YAML key and a name in errors and run.json.

The command line is made of them by `agentsd.command_line`: a docstring's first sentence is the help.
Nothing heavy is imported before a setting is checked.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    DirectoryPath,
    Field,
    FilePath,
    PrivateAttr,
    field_validator,
    model_validator,
)

from agentsd.dreambooth.config import check_folder, check_model, check_pipeline

from .files import image_files, read_lines
from .names import Sampler, is_method, read

if TYPE_CHECKING:
    from agentsd import Recipe

Backend = Literal["sdpa", "unfused"]
Scheduler = Literal["model", Sampler]
FeatureName = Literal["efficientnet-lite0", "inception"]
Scope = Literal["forward", "pipeline"]
Ratio = Annotated[float, Field(ge=0, le=0.75)]
DType = Literal["float32", "float16", "bfloat16"]
RESULTS = Path("agentsd-results")
"""Where commands write without --out."""
SEEDS = 2**32
"""Of which a generator on the CPU makes streams of their own: it reads no more of a seed than 32 bits."""
OneRatio = Annotated[Ratio, Field(description="Share of the tokens that is merged.")]


def _found(name: str) -> str:
    """Check the name of a model: the toy model's, a folder, a .safetensors file, or a hub id."""
    if not is_single_file(name):
        return check_model(name)
    if not Path(name).is_file():
        raise ValueError("there is no such file")
    with Path(name).open("rb") as file:
        if file.read(9)[8:] != b"{":  # of the header, after its length
            raise ValueError("it is no .safetensors file; download it anew")
    return name


def is_single_file(model: str) -> bool:
    """Whether a model is one file of all weights, as other programs keep it."""
    return model.endswith(".safetensors")


def _share(share: float) -> float:
    if not 0 < share < 1:
        raise ValueError(
            "pass shares of the steps between 0 and 1: of 25 steps 0.8,0.4 are 20 and 10; in --methods, "
            "baseline@20 is a row in 20 steps"
        )
    return share


DRIVERS = tuple(map(Path, ("/dev/nvidiactl", "/dev/nvmap", "/dev/kfd", "/dev/dxg")))
"""Of CUDA devices on Linux: NVIDIA's and its Jetson's, AMD's, and that of Windows for its Linux."""


def _there(name: str) -> str:
    """Check a device's name, as far as it can be without torch."""
    if not re.fullmatch(r"(cpu|cuda|hpu|mlu|mps|npu|xpu)(:\d\d?)?", name):
        raise ValueError("pass cpu, cuda, cuda:1 or mps")
    if name.startswith("cuda") and _has_no_card():
        raise ValueError("this machine has no CUDA device; use cpu")
    return name


def _has_no_card() -> bool:
    return sys.platform == "linux" and not any(map(Path.exists, DRIVERS))


def _for_a_card(kind: str) -> str:
    if _has_no_card():
        raise ValueError("this machine has no GPU whose memory it would save; leave it out")
    return kind


def _to_write(ending: str, path: Path) -> Path:
    """Check the name of a file to write."""
    if path.suffix != ending:
        raise ValueError(f"{'it is a folder; ' * path.is_dir()}name a file that ends in {ending}")
    return check_folder(path.parent) / path.name


Model = Annotated[str, AfterValidator(_found)]
OutFolder = Annotated[Path, AfterValidator(check_folder)]
Lines = Annotated[FilePath, AfterValidator(lambda path: read_lines(path) and path)]
Images = Annotated[DirectoryPath, AfterValidator(lambda folder: image_files(folder) and folder)]
Device = Annotated[str, AfterValidator(_there)]
Methods = Annotated[
    tuple[str, ...],
    Field(
        description="Rows: a mode, tomesd, todo, deepcache-N, spectrum-N, easycache-N, two joined by +, "
        "NAME@STEPS, NAME/SAMPLER. The modes are agentsd and fast. N is the interval of deepcache, the first "
        "window of spectrum, the threshold of easycache in hundredths. no-attention and no-attention-all "
        "leave out self-attention's core at the finest and at every level, an upper bound on speed."
    ),
]
FewerSteps = Annotated[
    tuple[Annotated[float, AfterValidator(_share)], ...],
    Field(description="Rows of baseline in these shares of the steps."),
]
PlainSamplers = Annotated[
    tuple[Sampler, ...],
    Field(description="Baseline's rows under these, too. Gain is then against the best of all of them."),
]
Steps = Annotated[int, Field(ge=1, le=1000, description="Denoising steps.")]
Guidance = Annotated[
    float,
    Field(ge=0, description="Guidance [4 for the toy model, 7.5 for others]. 1 or less turns it off."),
]
SchedulerName = Annotated[Scheduler, Field(description=f"Sampler: {', '.join(Scheduler.__args__)}.")]
ReferenceSteps = Annotated[
    Annotated[int, Field(ge=2)] | None,
    BeforeValidator(lambda given: None if given == "none" else given),
    Field(
        description="Steps of the baseline's reference images, or none. Every row is compared with them; "
        "without them rows are compared with the baseline's images alone.",
    ),
]


def processes() -> int:
    """Return how many processes a launcher has started for this command; 1 without one.

    torch's launcher and those of MPI leave their number where accelerate looks for it.
    """
    names = "WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"
    return max(int(size) if (size := os.environ.get(name, "")).isdecimal() else 1 for name in names)


class CommandSettings(BaseModel):
    """The settings of a command."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
    _command: str = PrivateAttr("")
    hidden: ClassVar[tuple[str, ...]] = ("named",)
    """Settings without an option; YAML may hold them."""
    resumes: ClassVar[bool] = False
    """Whether the command goes on where it was stopped."""
    shares: ClassVar[bool] = False
    """Whether several processes share its work; of other commands each would do it all, into one file."""


class Settings(CommandSettings):
    """What every command shares that a preset or a YAML file may set up: a model and how it samples.

    The defaults are those of all figures that are shown; presets of the paper's tables say theirs.
    """

    model: Annotated[Model, AfterValidator(check_pipeline)] = "demo"
    """demo (a toy), folder, .safetensors or hub id."""
    dtype: DType = "float32"
    """float32, float16 or bfloat16."""
    device: Device | None = None
    """cpu, cuda, cuda:1 [the first GPU, or the CPU]."""
    backend: Backend = "sdpa"
    """How attention is computed, a method's own, too."""
    scheduler: SchedulerName = "dpm++karras"
    steps: Steps = 25
    guidance_scale: Guidance = Field(
        default_factory=lambda known: 4.0 if known.get("model") == "demo" else 7.5
    )
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
                raise ValueError(f"{name!r} is a method already: choose another name, or rename its file")
            if isinstance(settings, dict):
                try:
                    recipe_of(settings)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from error
            elif not settings.exists():
                raise ValueError(f"{name}: {settings} isn't there; make it first")
        return named

    @model_validator(mode="after")
    def _known_methods(self) -> Settings:
        for text in getattr(self, "methods", ()):
            read(text, self.named)
        return self


def recipe_of(settings: Mapping[str, Any]) -> Recipe:
    """Return the recipe that keywords of `agentsd.apply_agentsd` make; `recipe` is what a recipe's file
    holds.

    Raises ValueError for an unknown keyword or a bad value.
    """
    from agentsd import Recipe
    from agentsd.recipe import MODES

    given = dict(settings)
    try:
        if "recipe" in given:
            if len(given) > 1 or not isinstance(given["recipe"], dict):
                raise ValueError(f"{given}: write what a recipe's file holds, which is all settings")
            return Recipe.from_mapping({"version": 1} | given["recipe"])
        if (mode := given.pop("mode", "agentsd")) not in MODES:
            raise ValueError(f"mode={mode!r}: choose {' or '.join(map(repr, MODES))}")
        return MODES[mode].with_settings(**given)
    except TypeError as error:
        raise ValueError(str(error)) from error


class SamplingSettings(Settings):
    """What the commands share that make images."""

    height: int | None = Field(None, ge=8, multiple_of=8)
    """Pixels, a multiple of 8 [the model's own]."""
    width: int | None = Field(None, ge=8, multiple_of=8)
    """Pixels, a multiple of 8 [the model's own]."""
    seed: int = Field(0, ge=0, lt=SEEDS)
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

    methods: Methods = ("baseline", "tomesd", "agentsd", "fast")
    fewer_steps: FewerSteps = (0.5,)
    samplers: PlainSamplers = ("unipckarras",)
    ratio: OneRatio = 0.4
    images: int = Field(6, ge=1)
    """How many prompts, where none is given."""
    differences: bool = False
    """Draw below each row where it differs from the baseline."""
    out: Annotated[Path, AfterValidator(partial(_to_write, ".png"))] = RESULTS / "compare.png"
    """The PNG to write."""


class CostSettings(Settings):
    """What the commands share that measure cost without looking at images."""

    arch: Literal["sd15", "sdxl"] | None = None
    """A bare architecture with random weights in place of a model."""
    methods: Methods = ("baseline", "tomesd", "agentsd", "fast")
    ratio: OneRatio = 0.4
    sizes: tuple[Annotated[int, Field(ge=64, multiple_of=8)], ...] = ()
    """Pixels on a side, multiples of 8 [the model's own]."""
    repeats: int = Field(5, ge=1)
    """Timed rounds; the median counts."""

    @model_validator(mode="after")
    def _one_model(self) -> CostSettings:
        if self.arch and "model" in self.model_fields_set:
            raise ValueError("--arch and --model exclude each other: give one")
        return self


class LatencySettings(CostSettings):
    """Measure cost alone: seconds, MACs and, on a GPU, memory; the methods take turns."""

    hidden: ClassVar[tuple[str, ...]] = ("named", "count")
    fewer_steps: FewerSteps = (0.8, 0.6, 0.4)
    batches: tuple[Annotated[int, Field(ge=1)], ...] = (1,)
    """Images at once."""
    scopes: tuple[Scope, ...] = ("forward", "pipeline")
    """What is timed: forward, pipeline. forward is one guided U-Net call in the early and in the later phase,
    pipeline a whole run."""
    compile: bool = False
    """Compile the U-Net under every method, baseline too."""
    count: bool = True
    """Count MACs, in the warm-up round."""
    out: OutFolder = RESULTS / "latency"
    """Folder for latency.jsonl, .csv and .md."""


class CalibrateSettings(ShowSettings):
    """Find the recipe that meets a goal, among the named ones and variations, on your model and prompts."""

    resumes: ClassVar[bool] = True
    images: int = Field(3, ge=1)
    """How many prompts, where none is given."""
    held_out: int = Field(0, ge=0)
    """How many prompts, the last ones, are kept for validation."""
    reference_steps: ReferenceSteps = None
    speedup: float | None = Field(None, gt=1)
    """The goal: how much cheaper a run."""
    max_distance: float | None = Field(None, gt=0)
    """Or the goal: the largest distance of final latents. It is the latent relative RMSE to the baseline's,
    such as 0.05."""
    cost: Literal["macs", "seconds"] = "macs"
    """What is to become cheaper. Seconds need a machine that does nothing else."""
    out: Annotated[Path, AfterValidator(partial(_to_write, ".json"))] = RESULTS / "calibrated.json"
    """The recipe's file (JSON) to write. What was measured is kept beside it (.jsonl), and the same command
    goes on."""

    @model_validator(mode="after")
    def _one_goal(self) -> CalibrateSettings:
        if (self.speedup is None) == (self.max_distance is None):
            raise ValueError(
                "give one goal: --speedup, for instance 1.8, or --max-distance, for instance 0.05"
            )
        if self.held_out >= (count := len(self.prompt) or self.images):
            raise ValueError(f"--held-out = {self.held_out} of {count} prompts: leave one to calibrate on")
        return self


class FidSettings(CommandSettings):
    """Print the FID and KID between two folders of images."""

    first: Images
    """A folder of images."""
    second: Images
    """Another, such as one of real images."""
    features: FeatureName = "inception"
    """Network; inception is that of real FID."""
    device: Device | None = None
    """cpu, cuda, cuda:1 [the first GPU, or the CPU]."""


class ReportSettings(CommandSettings):
    """Write one self-contained HTML page: gain and loss, images under a slider, plots, tables."""

    folder: DirectoryPath
    """A run's folder."""
    images: int = Field(12, ge=1)
    """How many seeds' images are shown."""


class FolderSettings(SamplingSettings):
    """What the commands share that keep a run's images in a folder, and go on with it."""

    resumes: ClassVar[bool] = True
    batch_size: int = Field(8, ge=1)
    """Images made at once. Fewer where there would be less than three batches; a run may go on with another
    number."""
    out: OutFolder = RESULTS / "table"
    """The run's folder. The same folder resumes it."""


class RunSettings(FolderSettings):
    """Make images with each method and ratio, and a row of quality and cost for each (Table 10)."""

    shares: ClassVar[bool] = True
    offload: Annotated[Literal["model", "sequential"], AfterValidator(_for_a_card)] | None = None
    """model or sequential: keep parts, or layers, off the GPU while idle. Slower; for 8 GB, or for 4."""
    methods: Methods = ("fast", "fast/unipckarras", "agentsd", "tomesd", "todo", "deepcache-2")
    fewer_steps: FewerSteps = (0.8, 0.68, 0.56, 0.48, 0.4)
    samplers: PlainSamplers = ("unipckarras",)
    ratios: tuple[Ratio, ...] = Field((0.4,), min_length=1)
    """Shares of the tokens to merge, for every method."""
    images: int = Field(64, ge=2)
    """Images for each row."""
    limit: int | None = Field(None, ge=2)
    """A trial on so many images a row, in OUT-limit-N. It takes as many real images."""
    prompts: Lines | None = None
    """A text file, a prompt a line. Without one, the toy model's captions are taken, or prompts that ship for
    other models."""
    classes: Lines | None = None
    """A text file, a class name a line. Two images of each are asked for by the paper's prompt."""
    reference: Images | None = None
    """A folder of real images [the toy model's own]."""
    references: int = Field(4096, ge=8)
    """Fresh scenes, the toy model's real images."""
    reference_steps: ReferenceSteps = 100
    features: FeatureName = "efficientnet-lite0"
    """Network of FD and KID; inception is that of real FID."""
    clip: Model | None = None
    """A CLIP model (folder or hub id) for the CLIP score."""

    @model_validator(mode="before")
    @classmethod
    def _trial_apart(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not values.get("limit"):
            return values
        out, mark = Path(values.get("out") or cls.model_fields["out"].default), f"-limit-{values['limit']}"
        return values if out.name.endswith(mark) else {**values, "out": out.with_name(out.name + mark)}

    @model_validator(mode="after")
    def _one_list(self) -> RunSettings:
        if self.classes and self.prompts:
            raise ValueError("--prompts and --classes exclude each other: give one")
        return self


class CheckSettings(RunSettings):
    """Check the recipes on your own model, beside the baseline in fewer steps; write a page, and all
    results in one file."""

    hidden: ClassVar[tuple[str, ...]] = ("named", "ratios", "fewer_steps", "references")
    references: int = 0
    calibrated: tuple[Path, ...] = ()
    """Recipes' files that `calibrate` wrote."""
    images: int = Field(32, ge=2)
    batch_size: int = Field(4, ge=1)
    out: OutFolder = RESULTS / "check"

    @model_validator(mode="before")
    @classmethod
    def _calibrated_are_rows(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not (paths := [Path(p) for p in values.get("calibrated") or ()]):
            return values
        if gone := [path for path in paths if not path.exists()]:
            raise ValueError(f"--calibrated = {gone[0]}: no such file; agentsd-eval calibrate writes one")
        if len(named := {path.stem: path for path in paths}) < len(paths):
            told = ", ".join(map(str, paths))
            raise ValueError(f"--calibrated = {told}: files are called alike: rename one")
        methods = [*values.get("methods", cls.model_fields["methods"].default), *named]
        return {
            **values,
            "methods": list(dict.fromkeys(methods)),
            "named": {**values.get("named", {}), **named},
        }

    @model_validator(mode="after")
    def _something_to_check(self) -> CheckSettings:
        if not any(read(text, self.named).parts for text in self.methods):
            raise ValueError(f"--methods = {','.join(self.methods) or 'none'}: name one that isn't baseline")
        return self
