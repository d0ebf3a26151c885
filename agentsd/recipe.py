"""A recipe: what runs when. Frozen dataclasses, checked when they are made, read and written here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from .attention import Agents, Downsample, Merge, Operator, ResidualSharing
from .cache import GuidanceCache, StepCache
from .checks import check, check_types
from .hosts.files import find_saved
from .schedule import ByDistance, Phases, Schedule, stages_of, timing_of, with_setting
from .serialization import (
    check_known,
    plain_values,
    read_schedule,
    read_settings,
    write_changed,
    write_schedule,
)
from .yaml_file import read_mapping

VERSION = 1
"""Of the file format."""
FILE_NAME = "agentsd.yaml"
_PARTS: dict[str, Any] = {"steps": StepCache, "guidance": GuidanceCache, "residual": ResidualSharing}


@dataclass(frozen=True)
class Recipe:
    """What an accelerated run does.

    Attributes:
        attention: what the self-attention of the patched levels runs; None leaves it alone.
        levels: how many attention levels are patched, counted from the model's finest one; None takes two, or
            one where there is one.
        layers: in place of `attention`: what single layers run, by their name in the model, such as
            "down_blocks.0.attentions.0.transformer_blocks.0.attn1". They share their steps.
        steps: which steps compute the last layers alone; None computes all in each.
        guidance: which calls compute the conditional pass alone; None computes both in each.
        residual: in which steps attention is full, and leaves to the others what the operators miss of it;
            None runs the operators as they are.
        seed: of the destinations sampled at random, 0 or more: the same pipeline seed gives the same image.
        measured: what was measured when it was found; for the reader.

    Raises:
        TypeError, ValueError: something has a wrong type or value, or would do nothing.
    """

    attention: Schedule | None = None
    levels: int | None = None
    layers: Mapping[str, Schedule] | None = None
    steps: StepCache | None = None
    guidance: GuidanceCache | None = None
    residual: ResidualSharing | None = None
    seed: int = 0
    measured: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        check_types(self)
        way_out = "pass 1 (the finest attention level) or more"
        check("levels", self.levels, self.levels is None or self.levels >= 1, way_out)
        check("seed", self.seed, 0 <= self.seed < 2**63, "pass an integer in [0, 2**63)")
        if not isinstance(self.measured, Mapping):
            raise ValueError(f"measured={self.measured!r}: it holds figures by name")
        for name, kind in _PARTS.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise TypeError(
                    f"{name}={value!r} is a {type(value).__name__}: pass {kind.__name__}() or None"
                )
        if self.residual is not None:
            self._check_residual()
        for schedule in [self.attention, *(self.layers or {}).values()]:
            if schedule is not None and not isinstance(schedule, Schedule):
                raise TypeError(
                    f"{schedule!r} is a {type(schedule).__name__}: pass Phases, ByDistance or Agents()"
                )
        if self.layers is not None:
            self._check_layers()
        elif self.attention is None:
            check("levels", self.levels, self.levels is None, "attention=None patches no level: leave it out")
            ok = self.steps is not None or self.guidance is not None
            check("attention", None, ok, "the recipe would do nothing: name what it is to do")
        for stages in (stages_of(schedule) for schedule in self.schedules):
            trained = {stage for stage in stages if stage is not None and stage.needs_module}
            check("attention", trained, len(trained) <= 1, "a layer has one trained module: name one")

    def _check_residual(self) -> None:
        some = self.attention is not None or self.layers is not None
        check("residual", self.residual, some, "it is of attention's operators: name some, or leave it out")

    def _check_layers(self) -> None:
        layers = self.layers
        assert layers is not None
        if self.attention is not None or self.levels is not None:
            raise ValueError(
                f"layers={dict(layers)!r} stand in place of attention and levels: leave those out"
            )
        if not layers:
            raise ValueError("layers={}: name a self-attention layer at least, or leave layers out")
        if baseline := [name for name, schedule in layers.items() if schedule is None]:
            raise ValueError(f"layers={baseline} would run full attention: leave them out")
        if odd := [name for name in layers if not isinstance(name, str)]:
            raise ValueError(f"layers={odd}: name each by a string, as in AgentSDHandle.layer_names")
        if len(timings := {timing_of(schedule) for schedule in layers.values()} - {None}) > 1:
            raise ValueError(f"layers differ in their steps, {sorted(map(str, timings))}: give all the same")
        object.__setattr__(self, "layers", MappingProxyType(dict(layers)))

    def __hash__(self) -> int:
        layers = None if self.layers is None else frozenset(self.layers.items())
        return hash(
            (self.attention, self.levels, layers, self.steps, self.guidance, self.residual, self.seed)
        )

    def __reduce__(self) -> tuple[Any, ...]:  # a mapping proxy is not pickled
        values = [getattr(self, f.name) for f in fields(self)]
        return Recipe, tuple(dict(value) if isinstance(value, Mapping) else value for value in values)

    @property
    def schedules(self) -> list[Schedule]:
        """What its layers run, each once."""
        every = [self.attention, *(self.layers or {}).values()]
        return list(dict.fromkeys(schedule for schedule in every if schedule is not None))

    @property
    def timing(self) -> Phases | ByDistance | None:
        """What the stages of its layers go by; None where they are the same in every step."""
        timed = [schedule for schedule in self.schedules if isinstance(schedule, Phases | ByDistance)]
        return timed[0] if timed else None

    @property
    def operators(self) -> list[Operator]:
        """All that run at some time in some layer, each once."""
        stages = [stage for schedule in self.schedules for stage in stages_of(schedule)]
        return list(dict.fromkeys(stage for stage in stages if stage is not None))

    def with_settings(self, **settings: Any) -> Recipe:
        """The recipe with `ratio`, `k`, `scale`, `early_frac` or `seed` changed wherever it has them.

        Raises:
            ValueError: it has no such setting.
        """
        recipe = self
        for name, value in settings.items():
            changed = replace(
                recipe,
                attention=with_setting(recipe.attention, name, value),
                layers=recipe.layers and {k: with_setting(v, name, value) for k, v in recipe.layers.items()},
                **({name: value} if name == "seed" else {}),
            )
            has = any(hasattr(part, name) for part in [*recipe.schedules, *recipe.operators])
            if not has and name != "seed":
                raise ValueError(f"{name}={value!r}: this recipe has no {name}, leave it out")
            recipe = changed
        return recipe

    def to_mapping(self) -> dict[str, Any]:
        """Plain values by name, as in a file: what differs from its default."""
        content: dict[str, Any] = {"version": VERSION}
        if self.attention is not None:
            content["attention"] = write_schedule(self.attention)
        if self.levels is not None:
            content["levels"] = self.levels
        if self.layers is not None:
            content["layers"] = {name: write_schedule(schedule) for name, schedule in self.layers.items()}
        for name in _PARTS:
            if (value := getattr(self, name)) is not None:
                content[name] = write_changed(value)
        if self.seed:
            content["seed"] = self.seed
        if self.measured:
            content["measured"] = dict(self.measured)
        values: dict[str, Any] = plain_values(content)
        return values

    @classmethod
    def from_mapping(cls, content: Mapping[Any, Any], where: str = "recipe") -> Recipe:
        """The recipe of plain values.

        Raises:
            ValueError: it is of another version, or not of this form; the message says `where`.
        """
        if (found := content.get("version")) != VERSION:
            raise ValueError(f"{where}: version {found!r} of a recipe is not read here, only {VERSION}")
        try:
            check_known(content, {"version", *(f.name for f in fields(cls))})
            layers = content.get("layers")
            if layers is not None and not isinstance(layers, dict):
                raise ValueError(f"layers={layers!r}: write `name: what it runs` lines")
            return cls(
                attention=read_schedule(content.get("attention")),
                levels=content.get("levels"),
                layers=layers and {name: read_schedule(value) for name, value in layers.items()},
                **{
                    name: read_settings(name, content[name], kind)
                    for name, kind in _PARTS.items()
                    if content.get(name) is not None
                },
                seed=content.get("seed", 0),
                measured=content.get("measured") or {},
            )
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: {error}") from None

    def save(self, path: str | Path) -> Path:
        """Write a YAML file, `agentsd.yaml` where the path is a folder; returns its path."""
        path = _file(path)
        text = yaml.safe_dump(self.to_mapping(), sort_keys=False, width=110)
        path.write_text(text, encoding="utf-8")
        return path

    @classmethod
    def load(cls, source: str | Path) -> Recipe:
        """Read what `save` wrote: a file, or the `agentsd.yaml` of a folder or hub repository.

        Args:
            source: a path, or "name/repository" on the hub.

        Raises:
            FileNotFoundError: there is no such file, folder or repository.
            ValueError: it is not YAML, or not a recipe.
        """
        path = find_saved(source, [FILE_NAME])
        try:
            file = _file(path)
            content = read_mapping(file)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{error.filename}: no such file; Recipe.save(path) writes one") from None
        except OSError as error:  # a name that is too long, links in a circle, a folder that may not be read
            raise ValueError(f"{path} can't be read: {error.strerror}") from None
        return cls.from_mapping(content, str(file))


def _file(path: str | Path) -> Path:
    return Path(path) / FILE_NAME if Path(path).is_dir() else Path(path)


PAPER = Recipe(
    Phases(Agents(at_most=None, agent_ratio=0.95, ranking="layer"), Merge(ranking="layer")), levels=1
)
"""AgentSD, as in the paper."""
STEP_CACHING = Recipe(steps=StepCache(interval=2, warmup_steps=4, late_interval=3))
"""Full attention; after four steps one in two is computed, and of the second half of those one in three."""
AGENTSD = Recipe(
    Phases(Agents(), Downsample(stride=4, at_most=None)),
    residual=ResidualSharing(interval=1, least_tokens=4096),
    steps=STEP_CACHING.steps,
)
"""Step caching whose cached steps run agents, later downsampled keys, on residuals of the computed ones."""
DOWNSAMPLE = replace(AGENTSD, attention=Downsample(stride=4, at_most=None))
"""The same with downsampled keys in all cached steps."""
MODES: dict[str, Recipe] = {
    "agentsd": AGENTSD,
    "downsample": DOWNSAMPLE,
    "step-caching": STEP_CACHING,
    "paper": PAPER,
}
