"""Whole checkpoints only: written beside their place and renamed when complete, with the run's settings."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from .config import MAY_CHANGE, DreamBoothConfig

NAME = re.compile(r"checkpoint-(\d+)")
SETTINGS = "settings.json"


def list_checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints of an output folder, oldest first."""
    found = [p for p in folder.glob("checkpoint-*") if p.is_dir() and NAME.fullmatch(p.name)]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    """The number of training steps before a checkpoint."""
    match = NAME.fullmatch(path.name)
    assert match is not None
    return int(match.group(1))


def find_checkpoint(folder: Path, name: str) -> Path | None:
    """The checkpoint of that name, or for "latest" the newest one (None where there is none yet).

    Raises:
        ValueError: there is no whole checkpoint of that name, or there are later ones, which would be lost.
    """
    have = list_checkpoints(folder)
    if name == "latest":
        return have[-1] if have else None
    if chosen := next((path for path in have if path.name == name), None):
        if later := [path.name for path in have if step_of(path) > step_of(chosen)]:
            raise ValueError(
                f"resume_from_checkpoint={name!r}: the run would overwrite {', '.join(later)} in {folder}; "
                "move them away first, or say 'latest'"
            )
        return chosen
    names = ", ".join(p.name for p in have) or "none"
    raise ValueError(f"resume_from_checkpoint={name!r} is not in {folder}; there: {names}; or say 'latest'")


def check_settings(checkpoint: Path, config: DreamBoothConfig) -> None:
    """Raise ValueError where a checkpoint's run had other settings that its next step depends on."""
    try:
        there = json.loads((checkpoint / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{checkpoint} has no readable {SETTINGS} ({error}): start anew elsewhere") from None
    now = config.model_dump(mode="json")
    differ = [name for name in now if name not in MAY_CHANGE and there.get(name) != now[name]]
    if differ:
        told = "; ".join(f"{name} was {there.get(name)!r}, is {now[name]!r}" for name in differ)
        raise ValueError(f"{checkpoint} is of a run with other settings: {told}; give its own, or start anew")


def check_space(folder: Path, model_bytes: int, checkpoint_bytes: int, limit: int | None) -> None:
    """See before training that the disk has room for the model and for checkpoints.

    Args:
        folder: the output folder.
        model_bytes: size of what is saved at the end.
        checkpoint_bytes: size of the trained weights and of the optimizer's moments.
        limit: how many checkpoints are kept; one more is being written. None counts as one.

    Raises:
        OSError: there is too little.
    """
    needed = model_bytes + checkpoint_bytes * ((limit or 1) + 1)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            f"{folder} has {free / 1e9:.1f} GB free, and the run needs {needed / 1e9:.1f} GB for the model "
            "and its checkpoints: make room, choose another --output_dir, or lower --checkpoints_total_limit"
        )


def save_checkpoint(accelerator: Accelerator, config: DreamBoothConfig, step: int) -> None:
    """Write `checkpoint-STEP`, then remove the oldest ones beyond the limit."""
    place = config.output_dir / f"checkpoint-{step}"
    partial = config.output_dir / f".partial-{step}"
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(partial), safe_serialization=True)
    # The states of this device's global generators: a step draws from none of them, and to load them would
    # set the user's.
    (partial / f"random_states_{accelerator.process_index}.pkl").unlink()
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (partial / SETTINGS).write_text(config.model_dump_json(indent=1), encoding="utf-8")
        shutil.rmtree(place, ignore_errors=True)
        partial.rename(place)
        if config.checkpoints_total_limit is not None:
            for old in list_checkpoints(config.output_dir)[: -config.checkpoints_total_limit]:
                shutil.rmtree(old)


def keep_trained(accelerator: Accelerator, modules: list[Any]) -> None:
    """Leave frozen weights out of the checkpoints; they are loaded with `strict=False`."""
    trained = [{name for name, p in module.named_parameters() if p.requires_grad} for module in modules]

    def drop(models: list[Any], weights: list[dict[str, Any]], folder: str) -> None:
        for names, state in zip(trained, weights, strict=True):
            for name in set(state) - names - {f"module.{name}" for name in names}:  # of several devices
                del state[name]

    accelerator.register_save_state_pre_hook(drop)
