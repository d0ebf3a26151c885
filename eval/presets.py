"""Settings from a preset or a YAML file, with the command line on top; what is wrong is named."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from agentsd.command_line import explain, shortened
from agentsd.dreambooth.yaml_file import read_mapping

from .errors import EvalError

_HERE = Path(__file__).resolve().parent
_INSTALLED, _CHECKOUT = _HERE / "configs", _HERE.parent / "configs"
PRESETS = _INSTALLED if _INSTALLED.is_dir() else _CHECKOUT
"""The folder of the presets that ship."""
_INPUT_FILES = {"prompts", "classes", "reference", "subject"}
SettingsT = TypeVar("SettingsT", bound=BaseModel)


def load_settings(
    kind: type[SettingsT], config: str | Path | None, overrides: Mapping[str, Any]
) -> SettingsT:
    """Return settings from a preset's name or a YAML file with `overrides` on top; None doesn't count.

    Files named in the YAML are looked for beside it, then in the working folder; `base` beside it, then among
    the presets.
    Raises EvalError naming each wrong key or value.
    """
    given = {key: value for key, value in overrides.items() if value is not None}
    path = None
    try:
        path = find_config(config) if config is not None else None
        values = _read_config(path) if path else {}
        return kind.model_validate({**values, **given})
    except ValidationError as error:
        of = presets().get(path.stem, {}).get("commands") if path and path.parent == PRESETS else None
        if of and any(problem["type"] == "extra_forbidden" for problem in error.errors()):
            raise EvalError(f"{config} is a preset: agentsd-eval {of[0]} --config {config}") from None
        raise EvalError("\n".join(explain(kind, error, set(given), path))) from None
    except OSError as error:  # of a name that is too long, or of a folder that may not be read
        raise EvalError(
            f"can't read {error.filename}: {error.strerror}; name another file or folder"
        ) from None


def find_config(config: str | Path) -> Path:
    """Return the file of that path, or the preset of that name."""
    path = Path(config)
    if path.exists() and not path.is_dir():
        return path
    if path.name == str(config) and (preset := PRESETS / f"{config}.yaml").is_file():
        return preset
    near = difflib.get_close_matches(path.stem, presets(), 1)
    meant = f"did you mean --config {near[0]}? " if near else ""
    raise EvalError(
        f"can't read the configuration {config}: no such file or preset; {meant}--list-configs lists presets"
    )


def presets() -> dict[str, dict[str, Any]]:
    """Return the presets of this program: `about` and `commands`, for the reader, and settings."""
    found = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in PRESETS.glob("*.yaml")}
    return {name: found[name] for name in sorted(found) if "about" in found[name]}


def _read(path: Path) -> dict[str, Any]:
    try:
        values = read_mapping(path)
    except OSError as error:
        raise EvalError(f"can't read the configuration {path}: {error.strerror}") from None
    except ValueError as error:
        raise EvalError(str(error)) from None
    return {key: value for key, value in values.items() if key not in ("about", "commands")}


def _read_config(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return a file's settings on top of those of its `base`, with its files' paths as they are from here."""
    if path in above:
        raise EvalError(f"{path}: base: {' -> '.join(p.name for p in (*above, path))} goes in a circle")
    values = _read(path)
    base = values.pop("base", None)
    for key in _INPUT_FILES & set(values):
        if isinstance(values[key], str):
            values[key] = _beside(path, values[key])
    if isinstance(named := values.get("named"), dict):
        values["named"] = {k: _beside(path, v) if isinstance(v, str) else v for k, v in named.items()}
    if base is None:
        return values
    if not isinstance(base, str):
        raise EvalError(f"{path}: base = {shortened(repr(base))}: write the name of a file beside it")
    beside, preset = path.parent / base, PRESETS / base
    found = preset if preset.exists() and not beside.exists() else beside
    return _read_config(found, (*above, path)) | values


def _beside(path: Path, name: str) -> Path:
    beside = path.parent / name
    return beside if beside.exists() or not Path(name).exists() else Path(name)
