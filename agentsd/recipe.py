"""Recipes: what runs in which step. Includes the modes, and reading and writing JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from .attention import Agents, Downsample, Merge, Operator, PooledAgents
from .attention.by_distance import ByDistance
from .attention.operator import check_operator
from .checks import check, check_types
from .modules import AgentModule, AttnZero, FocusedLinear
from .plan import ResidualSharing, StepCache


@dataclass(frozen=True)
class Phases:
    """One operator in the early, noisy steps and another in the later ones; None is full attention.

    Attributes:
        early, late: the operators.
        early_frac: share of the denoising steps that are early, in [0, 1].
    """

    early: Operator | None
    late: Operator | None
    early_frac: float = 0.4

    def __post_init__(self) -> None:
        check_types(self)
        ok = 0 <= self.early_frac <= 1
        check("early_frac", self.early_frac, ok, "pass a share in [0, 1], like 0.4")
        for name, operator in (("early", self.early), ("late", self.late)):
            check_operator(name, operator)
        same = f"early and late are both {self.early!r}: pass that alone, without Phases"
        if self.early == self.late:
            raise ValueError(same)

    @property
    def stages(self) -> tuple[Operator | None, ...]:
        """The operator of each stage of a run."""
        return self.early, self.late


Schedule: TypeAlias = Phases | ByDistance | Operator
"""What a layer runs when; a bare operator runs in every step."""


def stages_of(schedule: Schedule | None) -> tuple[Operator | None, ...]:
    """Return the operator of each stage of a run."""
    return schedule.stages if isinstance(schedule, Phases | ByDistance) else (schedule,)


def with_setting(settings: Any, name: str, value: Any) -> Any:
    """Return settings with every setting of this name changed, in nested settings, too."""
    if isinstance(settings, tuple):
        return tuple(with_setting(one, name, value) for one in settings)
    if not is_dataclass(settings) or isinstance(settings, type):
        return settings
    parts = {f.name: getattr(settings, f.name) for f in fields(settings)}
    changed = {one: value if one == name else with_setting(part, name, value) for one, part in parts.items()}
    return replace(settings, **changed)


_KINDS = (Agents, PooledAgents, Merge, Downsample, AgentModule, FocusedLinear, AttnZero)
OPERATORS: dict[str, type[Operator]] = {kind.name: kind for kind in _KINDS}
"""By their names in a file. Add your own operator here to read and write it."""


def write_schedule(schedule: Any) -> Any:
    """Return a schedule, or a part of one, as plain values: operators by name, with their settings."""
    if isinstance(schedule, Operator):
        return {schedule.name: write_changed(schedule)}
    if isinstance(schedule, Phases | ByDistance):
        return {f.name: write_schedule(getattr(schedule, f.name)) for f in fields(schedule)}
    if isinstance(schedule, tuple):
        return [write_schedule(one) for one in schedule]
    return "full" if schedule is None else schedule


def write_changed(settings: Any) -> dict[str, Any]:
    """Return the settings that differ from their defaults."""
    values = {f.name: (getattr(settings, f.name), f.default) for f in fields(settings)}
    return {name: value for name, (value, default) in values.items() if value != default}


def changed_text(settings: Any) -> str:
    """Return a dataclass as Python code, with only the settings that differ from their defaults."""
    if isinstance(settings, tuple):
        return f"({', '.join(map(changed_text, settings))})"
    if not is_dataclass(settings):
        return repr(settings)
    told = [f"{name}={changed_text(value)}" for name, value in write_changed(settings).items() if value != {}]
    return f"{type(settings).__name__}({', '.join(told)})"


def read_schedule(content: Any) -> Any:
    """Make a schedule of plain values: {agents: {ratio: 0.4}}, "full", or phases or stages of these."""
    if content is None or content == "full":
        return None
    if isinstance(content, dict) and "stages" in content:
        check_known(content, {"stages", "thresholds"})
        stages = content["stages"]
        read = [read_schedule(stage) for stage in stages] if isinstance(stages, list) else stages
        return ByDistance(**content | {"stages": read})
    if isinstance(content, dict) and ("early" in content or "late" in content):
        check_known(content, {"early", "late", "early_frac"})
        return Phases(**content | {name: read_schedule(content.get(name)) for name in ("early", "late")})
    return _read_operator(content)


def _read_operator(content: Any) -> Operator:
    """Make an operator of {agents: {ratio: 0.4}}, or of its bare name."""
    if isinstance(content, str):
        content = {content: {}}
    if not isinstance(content, dict):
        raise ValueError(f"{content!r}: name an operator, as `agents: {{ratio: 0.4}}`")
    [(name, settings), *more] = content.items() or [("", None)]
    if name not in OPERATORS or more:
        raise ValueError(f"{list(content)}: name one of {', '.join(OPERATORS)}")
    operator: Operator = read_settings(name, {} if settings is None else settings, OPERATORS[name])
    return operator


def read_settings(name: str, content: Any, kind: Any) -> Any:
    """Make settings of a kind from {interval: 2}; an empty mapping gives the defaults."""
    known = [f.name for f in fields(kind)]
    if not isinstance(content, dict):
        example = f"{{{known[0]}: {getattr(kind, known[0])!r}}}" if known else "{}"
        raise ValueError(f"{name}: {content!r} is no mapping of its settings, such as {example}")
    try:
        check_known(content, set(known))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return kind(**content)


def check_known(content: Mapping[Any, Any], known: set[str]) -> None:
    """Raise ValueError for a key that is none of those known."""
    if unknown := [key for key in content if key not in known]:
        raise ValueError(f"{unknown[0]!r} is unknown; the settings are {', '.join(sorted(known))}")


VERSION = 1
"""Version of the file format."""
FILE_NAME = "agentsd.json"
_LARGEST = 1_000_000  # bytes; a file of settings is never so large
_PARTS: dict[str, Any] = {"steps": StepCache, "residual": ResidualSharing}


@dataclass(frozen=True)
class Recipe:
    """What an accelerated run does.

    Attributes:
        attention: what self-attention runs on the patched levels; None leaves it alone.
        levels: how many attention levels are patched, counted from the finest; None takes two, or one if
            the model has only one.
        steps: which steps are cached and compute only the last layers; None computes all layers in each.
        residual: in which steps attention is full and stores its difference to the operators, which the
            other steps add; None runs the operators as they are.
        seed: seed of the randomly sampled destination tokens, 0 or more.
        measured: what was measured when the recipe was found; nothing depends on it.

    Raises:
        TypeError, ValueError: a setting has a wrong type or value, or the recipe would do nothing.
    """

    attention: Schedule | None = None
    levels: int | None = None
    steps: StepCache | None = None
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
                raise TypeError(f"{name}={value!r}: pass {kind.__name__}() or None")
        if self.attention is None:
            check("levels", self.levels, self.levels is None, "attention=None patches no level: leave it out")
            way_out = "it is of attention's operators: name some, or leave it out"
            check("residual", self.residual, self.residual is None, way_out)
            ok = self.steps is not None
            check("attention", None, ok, "the recipe would do nothing: name what it is to do")
        elif not isinstance(self.attention, Schedule):
            raise TypeError(f"attention={self.attention!r}: pass Phases, ByDistance or Agents()")
        trained = {operator for operator in self.operators if operator.needs_module}
        check("attention", trained, len(trained) <= 1, "a layer has one trained module: name one")

    @property
    def timing(self) -> Phases | ByDistance | None:
        """What decides the stage of a step; None if all steps are the same."""
        return self.attention if isinstance(self.attention, Phases | ByDistance) else None

    @property
    def operators(self) -> list[Operator]:
        """All operators that run at some time, each once."""
        return list(dict.fromkeys(stage for stage in stages_of(self.attention) if stage is not None))

    def with_settings(self, **settings: Any) -> Recipe:
        """Return the recipe with `ratio`, `k`, `scale`, `early_frac` or `seed` changed wherever it has them.

        Raises:
            ValueError: it has no such setting.
        """
        recipe = self
        for name, value in settings.items():
            if name != "seed" and not any(hasattr(part, name) for part in [self.attention, *self.operators]):
                raise ValueError(f"{name}={value!r}: this recipe has no {name}, leave it out")
            recipe = with_setting(recipe, name, value)
        return recipe

    def to_mapping(self) -> dict[str, Any]:
        """Return plain values by name, as in a file; defaults are left out."""
        forms: dict[str, Any] = {"attention": write_schedule, "measured": dict} | dict.fromkeys(
            _PARTS, write_changed
        )
        changed = {name: value for name, value in write_changed(self).items() if value != {}}
        content = {name: forms.get(name, int)(value) for name, value in changed.items()}
        # turns numpy's numbers into plain ones
        plain = json.loads(json.dumps(content, default=lambda number: number.item()))
        return {"version": VERSION, **plain}

    @classmethod
    def from_mapping(cls, content: Mapping[Any, Any], where: str = "recipe") -> Recipe:
        """Make a recipe of plain values.

        Raises:
            ValueError: the version or the form is wrong; the message begins with `where`.
        """
        if (found := content.get("version")) != VERSION:
            raise ValueError(f"{where}: version {found!r} of a recipe is not read here, only {VERSION}")
        try:
            check_known(content, {"version", *(f.name for f in fields(cls))})
            given = {
                name: value for name, value in content.items() if name != "version" and value is not None
            }
            for name in _PARTS.keys() & given.keys():
                given[name] = read_settings(name, given[name], _PARTS[name])
            return cls(**given | {"attention": read_schedule(content.get("attention"))})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: {error}") from None

    def save(self, path: str | Path) -> Path:
        """Write a JSON file, `agentsd.json` if the path is a folder; return its path.

        Raises:
            FileExistsError: there is a file that is not a recipe; it is left as it is.
        """
        path = _file(path)
        if path.exists():
            try:
                Recipe.load(path)
            except ValueError:
                raise FileExistsError(f"{path} is no recipe and stays as it is: pass another name") from None
        path.write_text(json.dumps(self.to_mapping(), indent=2) + "\n", encoding="utf-8")
        return path

    @classmethod
    def load(cls, source: str | Path) -> Recipe:
        """Read what `save` wrote: a file, or the `agentsd.json` of a folder.

        Args:
            source: a path.

        Raises:
            FileNotFoundError: there is no such file or folder.
            ValueError: it is not JSON, or not a recipe.
        """
        try:
            file = _file(source)
            content = _read(file)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{error.filename}: no such file; Recipe.save(path) writes one") from None
        except OSError as error:  # a name that is too long, links in a circle, a folder that may not be read
            raise ValueError(f"{source} can't be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{source} is no recipe: {error}; Recipe.save(path) writes one") from None
        return cls.from_mapping(content, str(file))


def _file(path: str | Path) -> Path:
    return Path(path) / FILE_NAME if Path(path).is_dir() else Path(path)


def _read(path: Path) -> dict[str, Any]:
    """Return what a JSON file of settings holds, whoever wrote it."""
    if path.exists() and not path.is_file():
        raise ValueError("it is no regular file")
    if path.stat().st_size > _LARGEST:
        raise ValueError(f"it is larger than {_LARGEST:,} bytes")
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}")
    return content


AGENTSD = Recipe(
    Phases(Agents(at_most=None, agent_ratio=0.95, ranking="layer"), Merge(ranking="layer")), levels=1
)
"""AgentSD to the letter of the paper: agents in the early steps, merged tokens in the later ones."""
FAST = Recipe(
    Downsample(stride=4, at_most=None),
    levels=1,  # the only one that cached steps compute
    residual=ResidualSharing(interval=2, warmup_steps=3, least_tokens=2304, interval_from=9216),
    steps=StepCache(interval=2, warmup_steps=3, late_interval=6),
)
"""Step caching. The cached steps attend to downsampled keys and add residuals of the full steps.

From 9,216 tokens on, every second full step does the same. After three steps, one step in two is
full; towards the end of the run, one in five or six.
"""
MODES: dict[str, Recipe] = {"agentsd": AGENTSD, "fast": FAST}
