"""A recipe: what runs when. Frozen dataclasses, checked when they are made, read and written here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import yaml

from .attention import Agents, Downsample, Merge, Operator, PooledAgents
from .checks import check, check_share, check_types
from .modules import AgentModule, AttnZero, FocusedLinear
from .reuse import ReuseGuidance, ReuseSteps
from .reuse.guidance import check_renewed
from .yaml_file import read_mapping

VERSION = 1
"""Of the file format."""
FILE_NAME = "agentsd.yaml"
_KINDS = (Agents, PooledAgents, Merge, Downsample, AgentModule, FocusedLinear, AttnZero)
OPERATORS: dict[str, type[Operator]] = {kind.name: kind for kind in _KINDS}
"""By their names in a file; add one's own here to read and write it."""


_REUSE: dict[str, Any] = {"steps": ReuseSteps, "guidance": ReuseGuidance}


@dataclass(frozen=True)
class Phases:
    """One operator in the early, noisy steps and another in the later ones; None is stock attention.

    Attributes:
        early, late: what runs.
        early_frac: share of the denoising steps that are early, in [0, 1].
    """

    early: Operator | None
    late: Operator | None
    early_frac: float = 0.4

    def __post_init__(self) -> None:
        check_types(self)
        check_share("early_frac", self.early_frac)
        _check_operators(early=self.early, late=self.late)
        same = f"early and late are both {self.early!r}: pass that alone, without Phases"
        if self.early == self.late:
            raise ValueError(same)

    @property
    def stages(self) -> tuple[Operator | None, ...]:
        """What runs in each stage of a run."""
        return self.early, self.late


@dataclass(frozen=True)
class ByDistance:
    """What runs by how far the latent moves in a step, for samplers that add noise, such as DDPM.

    From "Efficient Diffusion Transformer with Step-wise Dynamic Attention Mediators" (ECCV 2024), Eq. 11.

    Attributes:
        stages: what runs in each stage; None is stock attention.
        thresholds: shares of the first distance at which the next stage begins, falling.
        per: one stage for the whole "batch", or for each "sample" (needs `PooledAgents` in each stage, which
            differ in their count alone).
    """

    stages: tuple[Operator | None, ...]
    thresholds: tuple[float, ...]
    per: str = "batch"

    def __post_init__(self) -> None:
        for name in ("stages", "thresholds"):
            value = getattr(self, name)
            check(name, value, isinstance(value, list | tuple), "pass a list or a tuple")
            object.__setattr__(self, name, tuple(value))
        for stage in self.stages:
            _check_operators(stages=stage)
        falls = list(self.thresholds) == sorted(self.thresholds, reverse=True)
        ok = falls and all(isinstance(x, float | int) and x >= 0 for x in self.thresholds)
        check("thresholds", self.thresholds, ok, "pass falling shares of the first distance, as (0.6, 0.3)")
        count = len(self.thresholds) + 1
        check("stages", self.stages, len(self.stages) == count, f"thresholds make {count}: name so many")
        check("stages", self.stages, len(set(self.stages)) > 1, "they are all the same: pass that alone")
        check("per", self.per, self.per in ("batch", "sample"), "choose 'batch' or 'sample'")
        if self.per == "sample":
            alike = {replace(s, count=None) if isinstance(s, PooledAgents) else s for s in self.stages}
            ok = len(alike) == 1 and isinstance(next(iter(alike)), PooledAgents)
            check(
                "stages", self.stages, ok, "per='sample' needs PooledAgents that differ in their count alone"
            )


Schedule: TypeAlias = Phases | ByDistance | Operator
"""What a layer runs; an operator alone runs in every step."""


def stages_of(schedule: Schedule | None) -> tuple[Operator | None, ...]:
    """What runs in each stage of a run."""
    return schedule.stages if isinstance(schedule, Phases | ByDistance) else (schedule,)


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
        seed: of the cells drawn at random, 0 or more: the same pipeline seed gives the same picture.
        measured: what was measured when it was found; for the reader.

    Raises:
        TypeError, ValueError: something has a wrong type or value, or would do nothing.
    """

    attention: Schedule | None = None
    levels: int | None = None
    layers: Mapping[str, Schedule] | None = None
    steps: ReuseSteps | None = None
    guidance: ReuseGuidance | None = None
    seed: int = 0
    measured: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        check_types(self)
        way_out = "pass 1 (the finest attention level) or more"
        check("levels", self.levels, self.levels is None or self.levels >= 1, way_out)
        check("seed", self.seed, 0 <= self.seed < 2**63, "pass an integer in [0, 2**63)")
        if not isinstance(self.measured, Mapping):
            raise ValueError(f"measured={self.measured!r}: it holds figures by name")
        for name, kind in _REUSE.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise TypeError(
                    f"{name}={value!r} is a {type(value).__name__}: pass {kind.__name__}() or None"
                )
        check_renewed(self.steps, self.guidance)
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
            cores = {stage for stage in stages if stage is not None and stage.needs_core}
            check("attention", cores, len(cores) <= 1, "a layer has one trained module: name one")

    def _check_layers(self) -> None:
        layers = self.layers
        assert layers is not None
        if self.attention is not None or self.levels is not None:
            raise ValueError(
                f"layers={dict(layers)!r} stand in place of attention and levels: leave those out"
            )
        if not layers:
            raise ValueError("layers={}: name a self-attention layer at least, or leave layers out")
        if stock := [name for name, schedule in layers.items() if schedule is None]:
            raise ValueError(f"layers={stock} would run stock attention: leave them out")
        if odd := [name for name in layers if not isinstance(name, str)]:
            raise ValueError(f"layers={odd}: name each by a string, as in AgentHandle.layer_names")
        if len(timings := {_timing(schedule) for schedule in layers.values()} - {None}) > 1:
            raise ValueError(f"layers differ in their steps, {sorted(map(str, timings))}: give all the same")
        object.__setattr__(self, "layers", MappingProxyType(dict(layers)))

    def __hash__(self) -> int:
        layers = None if self.layers is None else tuple(self.layers.items())
        return hash((self.attention, self.levels, layers, self.steps, self.guidance, self.seed))

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
                attention=_changed(recipe.attention, name, value),
                layers=recipe.layers and {k: _changed(v, name, value) for k, v in recipe.layers.items()},
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
            content["attention"] = _write(self.attention)
        if self.levels is not None:
            content["levels"] = self.levels
        if self.layers is not None:
            content["layers"] = {name: _write(schedule) for name, schedule in self.layers.items()}
        for name in _REUSE:
            if (value := getattr(self, name)) is not None:
                content[name] = _write_settings(value)
        if self.seed:
            content["seed"] = self.seed
        if self.measured:
            content["measured"] = dict(self.measured)
        plain: dict[str, Any] = _plain(content)
        return plain

    @classmethod
    def from_mapping(cls, content: Mapping[Any, Any], where: str = "recipe") -> Recipe:
        """The recipe of plain values.

        Raises:
            ValueError: it is of another version, or not of this form; the message says `where`.
        """
        if (found := content.get("version")) != VERSION:
            raise ValueError(f"{where}: version {found!r} of a recipe is not read here, only {VERSION}")
        try:
            _only(content, {"version", *(f.name for f in fields(cls))})
            layers = content.get("layers")
            if layers is not None and not isinstance(layers, dict):
                raise ValueError(f"layers={layers!r}: write `name: what it runs` lines")
            return cls(
                attention=_read(content.get("attention")),
                levels=content.get("levels"),
                layers=layers and {name: _read(value) for name, value in layers.items()},
                **{
                    name: _read_settings(content[name], {kind.name: kind})
                    for name, kind in _REUSE.items()
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
    def load(cls, path: str | Path) -> Recipe:
        """Read what `save` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is not YAML, or not a recipe.
        """
        file = _file(path)
        try:
            content = read_mapping(file)
        except FileNotFoundError:
            raise FileNotFoundError(f"{file}: no such file; Recipe.save(path) writes one") from None
        return cls.from_mapping(content, str(file))


def _check_operators(**named: object) -> None:
    for name, value in named.items():
        if value is not None and not isinstance(value, Operator):
            raise TypeError(f"{name}={value!r} is a {type(value).__name__}: pass an operator, as Agents()")


def _file(path: str | Path) -> Path:
    return Path(path) / FILE_NAME if Path(path).is_dir() else Path(path)


def _timing(schedule: Schedule) -> tuple[Any, ...] | None:
    if isinstance(schedule, Phases):
        return (schedule.early_frac,)
    return (schedule.thresholds, schedule.per) if isinstance(schedule, ByDistance) else None


def _changed(schedule: Schedule | None, name: str, value: Any) -> Any:
    """A schedule with a setting changed wherever it has it."""
    if isinstance(schedule, Phases):
        early, late = (_changed(stage, name, value) for stage in schedule.stages)
        early_frac = value if name == "early_frac" else schedule.early_frac
        return replace(schedule, early=early, late=late, early_frac=early_frac)
    if isinstance(schedule, ByDistance):
        return replace(schedule, stages=tuple(_changed(stage, name, value) for stage in schedule.stages))
    return replace(schedule, **{name: value}) if hasattr(schedule, name) else schedule  # type: ignore[type-var]


def _write(schedule: Schedule | None) -> Any:
    if schedule is None:
        return "stock"
    if isinstance(schedule, Phases):
        early, late = map(_write, schedule.stages)
        return {"early": early, "late": late, "early_frac": schedule.early_frac}
    if isinstance(schedule, ByDistance):
        stages = [_write(stage) for stage in schedule.stages]
        return {"stages": stages, "thresholds": list(schedule.thresholds), "per": schedule.per}
    return _write_settings(schedule)


def _write_settings(settings: Any) -> dict[str, Any]:
    """{name: settings that are not the default}."""
    values = {f.name: (getattr(settings, f.name), f.default) for f in fields(settings)}
    return {settings.name: {name: value for name, (value, default) in values.items() if value != default}}


def _plain(content: Any) -> Any:
    """The same without numpy's numbers, which YAML has none of."""
    if isinstance(content, Mapping):
        return {_plain(key): _plain(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_plain(value) for value in content]
    return content.item() if hasattr(content, "item") else content


def _read(content: Any) -> Any:
    """A schedule of plain values: {agents: {ratio: 0.4}}, "stock", or phases or stages of these."""
    if content is None or content == "stock":
        return None
    if isinstance(content, dict) and "stages" in content:
        _only(content, {"stages", "thresholds", "per"})
        stages = content["stages"]
        read = [_read(stage) for stage in stages] if isinstance(stages, list) else stages
        return ByDistance(**content | {"stages": read})
    if isinstance(content, dict) and ("early" in content or "late" in content):
        _only(content, {"early", "late", "early_frac"})
        return Phases(**content | {name: _read(content.get(name)) for name in ("early", "late")})
    return _read_settings(content, OPERATORS)


def _read_settings(content: Any, kinds: Mapping[str, Any]) -> Any:
    """What a name and its settings say: {agents: {ratio: 0.4}}, or the name alone."""
    if isinstance(content, str):
        content = {content: {}}
    if not isinstance(content, dict):
        what = (
            "an operator, as `agents: {ratio: 0.4}`" if kinds is OPERATORS else "it, as `reuse: {every: 2}`"
        )
        raise ValueError(f"{content!r}: name {what}")
    [(name, settings), *more] = content.items() or [("", None)]
    if name not in kinds or more:
        raise ValueError(f"{list(content)}: name one of {', '.join(kinds)}")
    if not isinstance(settings or {}, dict):
        raise ValueError(f"{name}: {settings!r} is no mapping of its settings")
    _only(settings or {}, {f.name for f in fields(kinds[name])})
    return kinds[name](**settings or {})


def _only(content: Mapping[Any, Any], known: set[str]) -> None:
    if unknown := [key for key in content if key not in known]:
        raise ValueError(f"{unknown[0]!r} is unknown; the settings are {', '.join(sorted(known))}")


EXACT = Recipe(
    Phases(Agents(at_most=None, agent_ratio=0.95, ranking="layer"), Merge(ranking="layer")), levels=1
)
"""AgentSD, as in the paper."""
FAST = Recipe(Phases(Agents(), Downsample()))
"""One ranking a level, two levels, agents and keys bounded on large grids, keys downsampled later."""
TURBO = Recipe(Phases(Agents(feed_forward=True), Downsample()))
"""FAST, and early feed-forward layers on merged tokens."""
DOWNSAMPLE = Recipe(Downsample())
"""ToDo's downsampling in every step."""
REUSE = Recipe(steps=ReuseSteps(every=2, first=4, late_every=3))
"""Stock attention; after four steps one in two is full, and of the second half of those one in three."""
MODES: dict[str, Recipe] = {
    "exact": EXACT,
    "fast": FAST,
    "turbo": TURBO,
    "downsample": DOWNSAMPLE,
    "reuse": REUSE,
}
