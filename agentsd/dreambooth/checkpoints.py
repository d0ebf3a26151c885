"""Whole checkpoints only: written beside their place and renamed when complete, with the run's settings."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from .config import CONSTANT, MAY_CHANGE, DreamBoothConfig

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
    have, name = list_checkpoints(folder), Path(name).name
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


def resolve_settings(
    config: DreamBoothConfig, instance: list[Path], classes: list[Path], eight_bits: bool, processes: int
) -> dict[str, Any]:
    """All that the next step of a run depends on, with what this machine and the defaults make of it."""
    asked = config.model_dump(mode="json", exclude={*MAY_CHANGE})
    prior = config.with_prior_preservation
    drawn = max(config.num_class_images, len(classes)) if prior else 0  # at the first step
    source = Path(config.pretrained_model_name_or_path)
    return asked | {
        "pretrained_model_name_or_path": str(source.resolve() if source.is_dir() else source),
        "instance_images": _digest(instance),
        "class_images": _digest(classes),
        "num_class_images": drawn,
        "max_train_steps": config.steps(max(len(instance), drawn), processes),
        "learning_rate": config.rate(processes),
        "mixed_precision": config.precision,
        "use_8bit_adam": eight_bits,
        "processes": processes,
    }


def _digest(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return f"{len(paths)} images ({digest.hexdigest()[:12]})"


def check_settings(checkpoint: Path, now: dict[str, Any]) -> None:
    """Raise ValueError where a checkpoint's run had other settings, as `resolve_settings` has them."""
    try:
        there = json.loads((checkpoint / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{checkpoint} has no readable {SETTINGS} ({error}): start anew elsewhere") from None
    if now["lr_scheduler"] in CONSTANT:
        now = {name: value for name, value in now.items() if name != "max_train_steps"}
    differ = [name for name in now if there.get(name) != now[name]]
    if differ:
        told = "; ".join(f"{name} was {there.get(name)!r}, is {now[name]!r}" for name in differ)
        if "max_train_steps" in differ:
            told += f" (max_train_steps may change under --lr_scheduler {' or '.join(CONSTANT)})"
        raise ValueError(
            f"{checkpoint} is of a run with other settings: {told}; give its own, or start anew in another "
            "--output_dir"
        )


def check_space(folder: Path, model_bytes: int, checkpoint_bytes: int, limit: int, to_come: int) -> None:
    """See before training that the disk has room for the model and for checkpoints.

    Args:
        folder: the output folder.
        model_bytes: size of what is saved at the end.
        checkpoint_bytes: size of the trained weights and of the optimizer's moments.
        limit: how many checkpoints are kept, or 0 for all; one more is being written.
        to_come: how many the run is still to write.

    Raises:
        OSError: there is too little.
    """
    there = len(list_checkpoints(folder))
    more = min(max(1, limit + 1 - there), to_come) if limit else to_come
    needed = model_bytes + checkpoint_bytes * more
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            f"{folder} has {free / 1e9:.1f} GB free, and the run needs {needed / 1e9:.1f} GB for the model "
            "and its checkpoints: make room, choose another --output_dir, or keep fewer by "
            "--checkpoints_total_limit"
        )


def save_checkpoint(
    accelerator: Accelerator, config: DreamBoothConfig, settings: dict[str, Any], step: int
) -> None:
    """Write `checkpoint-STEP` with the run's resolved settings, then remove the oldest beyond the limit."""
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
        (partial / SETTINGS).write_text(json.dumps(settings, indent=1), encoding="utf-8")
        shutil.rmtree(place, ignore_errors=True)
        partial.rename(place)
        if config.checkpoints_total_limit:
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
