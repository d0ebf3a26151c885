"""Settings of agent attention: one frozen dataclass, checked when it is made."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any

CHOICES = {
    "mode": ("exact", "fast", "turbo"),
    "attention": ("agent", "module", "focused", "attnzero"),
    "agents": ("merge", "pool"),
    "schedule": ("early", "distance"),
    "schedule_per": ("batch", "sample"),
    "early": ("agent", "tome", "downsample", "none"),
    "late": ("tome", "downsample", "none", "agent"),
    "cells": ("auto", "random", "first"),
}
MODES = CHOICES["mode"]
FILE_NAME = "agentsd.json"


@dataclass(frozen=True)
class AgentConfig:
    """Settings of AgentSD ("Agent Attention", ECCV 2024, Eq. 9 and appendix B).

    Attributes:
        ratio: share of the tokens merged away before attention, in [0, 1).
        k: weight of the `+ kV` residual, 0 or more.
        scale: exponent of the head width `d` in the broadcast softmax, `d**scale`; 0 or less. The usual
            attention scale is -0.5, the paper's is -0.15.
        early_frac: share of the denoising steps, from the noisiest on, that run agent attention; in [0, 1].
        mode: "exact" is the paper to the letter. "fast" ranks the tokens once for all layers of a level,
            takes the second finest level too, and bounds the agents and the downsampled keys on large grids
            (`agentsd.plan.MAX_AGENTS`, `MAX_KEYS`).
            "turbo" is "fast", and also runs the feed-forward layers of these blocks on merged tokens in early
            steps.
        attention: "agent" needs no training. The others are modules to be trained (`agentsd.modules`), on all
            tokens of the steps that run agents: "module" (Agent Attention, Eq. 6, which starts as "agent"
            with agents="pool" and ratio=0), "focused" (FLatten) and "attnzero".
        parts: of these modules, "bias" and "convolution"; leave one out for an ablation.
        agents: where the agents come from: "merge" (the token ranking, as AgentSD) or "pool" (averages over
            the grid of queries, as the mediators of "Efficient Diffusion Transformer with Step-wise Dynamic
            Attention Mediators", ECCV 2024).
        agent_counts: how many agents, at most; empty takes one for each cell of `early_stride`. With
            schedule="distance" one number for each stage, 0 for a stage that runs what `late` says.
        schedule: which steps run agents: "early" (the first `early_frac` of them) or "distance" (by how
            far the latent moves, see `agentsd.mediators`; for samplers that add noise, such as DDPM).
        thresholds: for schedule="distance", the shares of the first distance at which the next stage
            begins, falling, one less than `agent_counts`.
        schedule_per: one stage for the whole "batch", or for each "sample" (needs agents="pool").
        early: what steps with agents run: "agent", or for comparison what `late` may say.
        late: what the later steps run: "tome" (token merging, as the paper), "downsample" (all queries, but
            keys and values of the first token in each cell of `late_stride` alone: "ToDo: Token
            Downsampling for Efficient Generation of High-Resolution Images", 2024), "none" (stock
            attention), or "agent" as well; None takes "tome" in exact mode and "downsample" in the others.
        late_ratio: `ratio` of the later steps, where they merge; None takes the same.
        levels: how many attention levels are patched, counted from the model's finest one; None takes 1 in
            exact mode and 2, where there are as many, in the others.
        agent_ratio: share of the tokens merged away to make the agents, in (0, 1); at least the destination
            tokens stay.
        early_stride: side of the cells that hold one destination token each, in early steps.
        late_stride: the same in later steps.
        cells: the destination token of each cell: "random", "first" (top left), or "auto": random for an
            even batch and first for an odd one, as ToMeSD does.
        seed: seed of the random cells, 0 or more.

    Raises:
        TypeError, ValueError: a field has a wrong type or value; the message names both and the way out.
    """

    ratio: float = 0.4
    k: float = 0.075
    scale: float = -0.15
    early_frac: float = 0.4
    mode: str = "fast"
    attention: str = "agent"
    parts: tuple[str, ...] = ("bias", "convolution")
    agents: str = "merge"
    agent_counts: tuple[int, ...] = ()
    schedule: str = "early"
    thresholds: tuple[float, ...] = ()
    schedule_per: str = "batch"
    early: str = "agent"
    late: str | None = None
    late_ratio: float | None = None
    levels: int | None = None
    agent_ratio: float = 0.95
    early_stride: int = 4
    late_stride: int = 2
    cells: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            if isinstance(getattr(self, field.name), list):  # as JSON and YAML have it
                object.__setattr__(self, field.name, tuple(getattr(self, field.name)))
            _check_type(field.name, getattr(self, field.name), str(field.type))
        _check("ratio", self.ratio, 0 <= self.ratio < 1, "pass a share in [0, 1), for instance 0.4")
        late = self.late_ratio
        _check("late_ratio", late, late is None or 0 <= late < 1, "pass a share in [0, 1), or None")
        _check("k", self.k, self.k >= 0, "pass 0 or more, for instance 0.075")
        _check(
            "scale",
            self.scale,
            self.scale <= 0,
            "it is the exponent of the head width: pass -0.15 (the paper) or any value of 0 or less",
        )
        _check("early_frac", self.early_frac, 0 <= self.early_frac <= 1, "pass a share in [0, 1], like 0.4")
        _check("agent_ratio", self.agent_ratio, 0 < self.agent_ratio < 1, "pass a share in (0, 1), like 0.95")
        _check(
            "levels",
            self.levels,
            self.levels is None or self.levels >= 1,
            "pass 1 (the finest attention level) or more",
        )
        for name in ("early_stride", "late_stride"):
            stride = getattr(self, name)
            _check(name, stride, stride >= 2, "pass 2 or more")
        _check("seed", self.seed, 0 <= self.seed < 2**63, "pass an integer in [0, 2**63)")
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            ok = value in choices or (name, value) == ("late", None)
            _check(name, value, ok, "choose " + " or ".join(map(repr, choices)))
        merges = late is None or self.does_late in ("tome", "agent")
        _check("late_ratio", late, merges, "later steps merge under late='tome' or 'agent' alone: name one")
        known = {"bias", "convolution"}
        _check("parts", self.parts, set(self.parts) <= known, "leave out 'bias' or 'convolution', no more")
        self._check_stages()

    def _check_stages(self) -> None:
        counts, thresholds = self.agent_counts, self.thresholds
        by_distance = self.schedule == "distance"
        _check("late", self.late, not by_distance or self.late != "agent", "a stage of 0 agents has none")
        _check("agent_counts", counts, all(n >= 0 for n in counts), "pass numbers of agents, 0 or more")
        if by_distance:
            stages = f"pass one number for each of the {len(thresholds) + 1} stages that thresholds make"
            _check("agent_counts", counts, len(counts) == len(thresholds) + 1 and any(counts), stages)
        else:
            one = "pass one number, 1 or more, or () for the default; stages need schedule='distance'"
            _check("agent_counts", counts, len(counts) <= 1 and all(counts), one)
            _check("thresholds", thresholds, not thresholds, "they need schedule='distance'")
        falling = all(x >= 0 for x in thresholds) and list(thresholds) == sorted(thresholds, reverse=True)
        _check("thresholds", thresholds, falling, "pass falling shares of the first distance, as (0.6, 0.3)")
        each = self.schedule_per == "sample"
        _check(
            "schedule_per",
            self.schedule_per,
            not each or (by_distance and self.agents == "pool"),
            "a stage for each sample needs schedule='distance' and agents='pool'",
        )

    @property
    def does_late(self) -> str:
        """What the later steps run: `late`, or what the mode takes where that is None."""
        if self.late is not None:
            return self.late
        return "tome" if self.mode == "exact" else "downsample"

    def save(self, folder: str | Path) -> Path:
        """Write the settings to `agentsd.json` in a folder, say a finetuned model's; returns its path."""
        path = Path(folder) / FILE_NAME
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: str | Path) -> AgentConfig:
        """Read settings from a file, or from `agentsd.json` in a folder; what it leaves out has its default.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is not JSON, or has an unknown key.
        """
        path = Path(path)
        file = path / FILE_NAME if path.is_dir() else path
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise FileNotFoundError(f"{file}: no such file; AgentConfig.save(folder) writes one") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"{file} is not JSON: {error}") from None
        return cls.from_mapping(values, str(file))

    @classmethod
    def from_mapping(cls, values: Any, where: str) -> AgentConfig:
        """Settings by name; an unknown one raises ValueError that says `where` it stands."""
        known = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or (unknown := sorted(set(values) - known)):
            found = unknown if isinstance(values, dict) else values
            raise ValueError(f"{where}: {found!r} is unknown; the settings are {', '.join(sorted(known))}")
        return cls(**values)


def _check(name: str, value: object, ok: bool, way_out: str) -> None:
    if not ok:
        raise ValueError(f"{name}={value!r}: {way_out}")


_KINDS: dict[str, tuple[type, ...]] = {"str": (str,), "int": (Integral,), "float": (Real,)}


def _check_type(name: str, value: object, kind: str) -> None:
    if value is None and kind.endswith(" | None"):
        return
    kind = kind.removesuffix(" | None")
    of_each = kind.removeprefix("tuple[").removesuffix(", ...]")
    if of_each != kind and not isinstance(value, tuple):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}: pass a tuple of {of_each}")
    for single in value if isinstance(value, tuple) else (value,):
        if not isinstance(single, _KINDS[of_each]) or isinstance(single, bool):
            raise TypeError(f"{name}={value!r} is a {type(single).__name__}: pass a {of_each}")
        if of_each == "float" and not math.isfinite(single):  # type: ignore[arg-type]
            raise ValueError(f"{name}={value!r}: pass a finite number")
