"""The environment of a figure: commit, machine, versions, settings and command."""

import os
import platform
import subprocess
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from .settings import CommandSettings, processes

_PACKAGES = ("agentsd", "torch", "diffusers", "transformers", "tomesd", "DeepCache", "numpy")


def describe_run(settings: CommandSettings, *environments: dict[str, Any]) -> dict[str, Any]:
    """Return the command (of a call from Python the settings), the settings, and the environment.

    Of several environments each fact that differs has all its values.
    """
    return {
        "command": settings._command or repr(settings),
        **_joined(environments),
        "settings": settings.model_dump(mode="json", exclude={"out"}),
    }


def _joined(values: Sequence[Any]) -> Any:
    first = values[0]
    if all(value == first for value in values):
        return first
    if isinstance(first, dict):
        return {key: _joined([value.get(key) for value in values]) for key in first}
    return " and ".join(dict.fromkeys(map(str, values)))


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Return what a figure depends on beside its settings.

    `commit` is None outside a checkout, where the version of agentsd says as much; `clean` is whether no
    tracked file differs from it.
    """
    return {
        **checkout(Path(__file__).resolve().parents[1]),
        "device": device_name(device),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "clock": "CPU" if device.type == "cpu" else "wall",
        "threads": torch.get_num_threads(),
        "processes": processes(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
    }


def device_name(device: torch.device) -> str:
    """Return what a device is called: a GPU's own name where torch knows it, beside the processor's."""
    if device.type == "cpu":
        return cpu_model()
    named = getattr(torch.get_device_module(device), "get_device_name", None)
    return named(device) if named else f"{device.type} of {cpu_model()}"


@cache
def checkout(root: Path) -> dict[str, Any]:
    """Return the commit of the git checkout of this root, and whether its tracked files are unchanged."""
    if not (root / ".git").exists():
        return {"commit": None, "clean": None}

    asked = ["git", "-C", str(root), "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        told = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):  # no git, or it doesn't trust the folder
        return {"commit": None, "clean": None}
    commit = told[0].removeprefix("# branch.oid ")
    return {"commit": commit, "clean": all(line.startswith("#") for line in told)}


def cpu_model() -> str:
    """Return what the processor is called."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
