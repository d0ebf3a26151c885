"""The methods a row can name: each is applied to a pipeline for the length of a `with` block."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentsd import Recipe, apply_agentsd
from agentsd.recipe import MODES

from ..errors import EvalError
from ..names import numbered, read
from ..settings import Backend, FewerSteps, Settings, recipe_of
from .backend import attention_backend
from .models import sampler, scheduler_like
from .other_packages import OTHER_PACKAGES, unet_of


@dataclass(frozen=True)
class Method:
    """One or more accelerators at one setting, such as ("agentsd", "deepcache") at ratio 0.4."""

    parts: tuple[str, ...]
    ratio: float | None = None
    backend: Backend = "sdpa"
    recipe: Recipe | Path | None = None
    """What a part runs that has a name of the user's own, or a folder with trained attention."""
    steps: int | None = None
    """Denoising steps; None is as many as the run's."""
    scheduler: str | None = None
    """The sampler; None is the run's."""

    @property
    def name(self) -> str:
        """The parts joined by "+", or "baseline"; after "@" steps of its own, after "/" a sampler."""
        steps = "" if self.steps is None else f"@{self.steps}"
        sampler = "" if self.scheduler is None else f"/{self.scheduler}"
        return ("+".join(self.parts) or "baseline") + steps + sampler

    @property
    def key(self) -> str:
        """A folder name that differs wherever the images may differ."""
        words = [self.name.replace("/", "@")]
        if self.ratio is not None:
            words.append(f"r{self.ratio:g}")
        for recipe in self._recipes:  # of a mode, too: another version's may be another
            words.append(_hash(repr(recipe.to_mapping()).encode()))
        if isinstance(self.recipe, Path):
            words.append(_content(self.recipe))
        words.append(self.backend)
        return "-".join(words)

    @property
    def label(self) -> str:
        """What people call it, such as "agentsd r=0.4"."""
        return self.name if self.ratio is None else f"{self.name} r={self.ratio:g}"

    @property
    def is_baseline(self) -> bool:
        """Whether nothing is changed, not even the number of steps or the sampler."""
        return not self.parts and self.steps is None and self.scheduler is None

    @property
    def interval(self) -> int | None:
        """The steps between two full steps of DeepCache; None without it."""
        return next((number for kind, number in self._numbered if kind == "deepcache"), None)

    @property
    def within_a_call(self) -> bool:
        """Whether what it saves shows in one U-Net call: no call is left out."""
        calls_left_out = any(recipe.steps for recipe in self._recipes)
        return not self._numbered and (self.steps, self.scheduler) == (None, None) and not calls_left_out

    @property
    def _recipes(self) -> list[Recipe]:
        own = [self.recipe] if isinstance(self.recipe, Recipe) else []
        return [MODES[part] for part in self.parts if part in MODES] + own

    @property
    def _numbered(self) -> list[tuple[str, int]]:
        return [found for part in self.parts if (found := numbered(part))]

    @contextmanager
    def applied(self, pipe: Any, seed: int = 0) -> Iterator[None]:
        """Patch `pipe` (a pipeline or, without deepcache, a U-Net) and put everything back on leaving.

        `seed` fixes the method's own random choices.
        """
        with ExitStack() as stack:
            stack.enter_context(attention_backend(unet_of(pipe), self.backend))
            if self.scheduler is not None:
                stack.enter_context(sampler(pipe, self.scheduler))
            for part in self.parts:
                kind, number = numbered(part) or (part, None)
                if part in MODES or kind not in OTHER_PACKAGES:
                    stack.enter_context(_recipe(self, pipe, part))
                else:
                    other = OTHER_PACKAGES[kind]
                    stack.enter_context(other(pipe, self.ratio if number is None else number, seed))
            yield


def parse_method(text: str, ratio: float | None, settings: Settings) -> Method:
    """Return the method named by `text`, as "agentsd+deepcache", "baseline@20" or "fast/unipckarras";
    "baseline" has no parts.

    A method that has no ratio drops it. Raises EvalError on an unknown name.
    """
    try:
        name = read(text, settings.named)
        own: Any = next((settings.named[part] for part in name.parts if part in settings.named), None)
        if isinstance(own, dict):
            own = recipe_of(own)
        elif own is not None and own.is_file():
            own = Recipe.load(own)
    except (OSError, ValueError) as error:
        raise EvalError(str(error)) from None
    mode = next((MODES[part] for part in name.parts if part in MODES), None)
    has_ratio = mode and any(hasattr(part, "ratio") for part in mode.operators)
    if "tomesd" not in name.parts and not has_ratio:
        ratio = None
    sampler = None if name.sampler == settings.scheduler else name.sampler
    return Method(name.parts, ratio, settings.backend, own, name.steps, sampler)


def fewer(shares: FewerSteps, settings: Settings) -> list[Method]:
    """Return baseline in each share of the steps: the baseline that costs nothing to have."""
    baseline = parse_method("baseline", None, settings)
    counts = [max(1, round(share * settings.steps)) for share in shares]
    return [replace(baseline, steps=count) for count in dict.fromkeys(counts) if count < settings.steps]


def plain_rows(shares: FewerSteps, samplers: Sequence[str], settings: Settings) -> list[Method]:
    """Return baseline under other samplers, in all steps and in each share of them."""
    others = [name for name in dict.fromkeys(samplers) if name != settings.scheduler]
    whole = parse_method("baseline", None, settings)
    runs = [whole, *fewer(shares, settings)] if shares else []
    return [replace(run, scheduler=name) for name in others for run in runs]


def expand(
    names: Sequence[str],
    ratios: Sequence[float],
    settings: Settings,
    fewer_steps: FewerSteps = (),
    samplers: Sequence[str] = (),
) -> list[Method]:
    """Return "baseline" first, then in fewer steps, then under other samplers, then every method at every
    ratio, without repeats."""
    methods = [parse_method("baseline", None, settings), *fewer(fewer_steps, settings)]
    methods += plain_rows(fewer_steps, samplers, settings)
    for name in names:
        for ratio in ratios:
            method = parse_method(name, ratio, settings)
            if method not in methods:
                methods.append(method)
    return methods


@contextmanager
def _recipe(method: Method, pipe: Any, part: str) -> Iterator[None]:
    """A recipe by its name, or a user's own."""
    ratio = {} if method.ratio is None else {"ratio": method.ratio}
    settings: dict[str, Any] = {"mode": part, **ratio} if part in MODES else {"recipe": method.recipe}
    try:
        handle = apply_agentsd(pipe, **settings)
    except (TypeError, ValueError, OSError) as error:
        raise EvalError(f"{method.label}: {error}") from error
    with handle:
        yield


def _content(folder: Path) -> str:
    """A short hash of the settings and weights in a folder."""
    return _hash(b"".join(file.read_bytes() for file in sorted(folder.glob("agentsd.*"))))


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:8]


def check_schedulers(methods: Sequence[Method], scheduler: Any, steps: int) -> None:
    """Raise EvalError where a sampler does not suit the model, or DeepCache the sampler in so many `steps`.

    DeepCache 0.1.1 finds its step by the first equal timestep. PLMS repeats one timestep, which is
    harmless where both calls reuse the cache (an interval of 3 or more); Heun repeats them all.
    """
    for method in methods:
        own = scheduler_like(scheduler, method.scheduler or "model")
        if (interval := method.interval) is None:
            continue
        own.set_timesteps(method.steps or steps)
        timesteps = own.timesteps.tolist()
        for call, timestep in enumerate(timesteps):
            if (timesteps.index(timestep) % interval == 0) != (call % interval == 0):
                raise EvalError(
                    f"DeepCache mistakes call {call} of {type(own).__name__} for an earlier one "
                    f"(timestep {timestep} repeats) at interval {interval}; use --scheduler ddim"
                )
