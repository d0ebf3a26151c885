"""Settings layer by layer: what `agentsd.calibrate` finds, and `apply_agentsd` takes as `config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .config import AgentConfig


@dataclass(frozen=True)
class LayerConfigs:
    """An `AgentConfig` for each self-attention layer; the ones that are not named are left untouched.

    Attributes:
        layers: settings by the layer's name in the model, such as
            "down_blocks.0.attentions.0.transformer_blocks.0.attn1". They share their steps: `early_frac`,
            `schedule`, `thresholds`, `schedule_per`, and under schedule="distance" `agent_counts`.
        measured: what was measured when they were found; for the reader.

    Raises:
        ValueError: there is no layer, a name is no string, or their steps differ.
    """

    layers: Mapping[str, AgentConfig]
    measured: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("layers={}: name a self-attention layer at least, or do not apply agentsd")
        if odd := [name for name in self.layers if not isinstance(name, str)]:
            raise ValueError(f"layers={odd}: name each by a string, as in AgentHandle.layer_names")
        if not isinstance(self.measured, Mapping):
            raise ValueError(f"measured={self.measured!r}: it holds figures by name")
        if len(steps := {_steps(config) for config in self.layers.values()}) > 1:
            raise ValueError(f"layers differ in their steps, {sorted(map(str, steps))}: give all the same")

    @property
    def first(self) -> AgentConfig:
        """One of the layers' settings, for what they share."""
        return next(iter(self.layers.values()))

    def save(self, path: str | Path) -> Path:
        """Write a YAML file of every setting that differs from its default; returns its path."""
        default = asdict(AgentConfig())
        layers = {
            name: {
                key: list(value) if isinstance(value, tuple) else value
                for key, value in asdict(config).items()
                if value != default[key]
            }
            for name, config in self.layers.items()
        }
        path = Path(path)
        content = {"layers": layers, "measured": dict(self.measured)}
        path.write_text(yaml.safe_dump(content, sort_keys=False, width=110), encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: str | Path) -> LayerConfigs:
        """Read what `save` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is not YAML, or not of this form, or has an unknown setting.
        """
        try:
            content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{path}: no such file; agentsd.calibrate(...).save(path) makes one"
            ) from None
        except yaml.YAMLError as error:
            raise ValueError(f"{path} is not YAML: {error}") from None
        layers = content.get("layers") if isinstance(content, dict) else None
        if not isinstance(layers, dict):
            raise ValueError(f"{path} has no `layers:` with settings by layer name")
        configs = {name: _read(values, f"{path}, {name}") for name, values in layers.items()}
        return cls(configs, content.get("measured") or {})


def _read(values: Any, where: str) -> AgentConfig:
    try:
        return AgentConfig.from_mapping(values or {}, "settings")
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None


def _steps(config: AgentConfig) -> tuple[Any, ...]:
    counts = config.agent_counts if config.schedule == "distance" else ()
    return config.early_frac, config.schedule, config.thresholds, config.schedule_per, counts


def load_config(path: str | Path) -> AgentConfig | LayerConfigs:
    """Read either kind of settings: a YAML file holds layers, a folder or another file an `AgentConfig`."""
    if Path(path).suffix in (".yaml", ".yml"):
        return LayerConfigs.load(path)
    return AgentConfig.load(path)
