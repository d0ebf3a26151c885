"""Apply a recipe to a live pipeline, and take it away again."""

from __future__ import annotations

import inspect
from functools import lru_cache
from pathlib import Path
from typing import Any
from weakref import WeakSet

from diffusers.utils import logging

from .attention import Agents
from .handle import AgentSDHandle
from .hosts.models import find_model
from .modules.adapter import FILE_NAME as WEIGHTS
from .recipe import FILE_NAME, MODES, Recipe
from .schedule import Phases

logger = logging.get_logger(__name__)
_handles: WeakSet[AgentSDHandle] = WeakSet()
"""All that live: a pipeline's U-Net may have been exchanged since it was patched."""


def apply_agentsd(
    pipe: Any,
    ratio: float = Agents.ratio,
    k: float = Agents.k,
    scale: float = Agents.scale,
    early_frac: float = Phases.early_frac,
    *,
    mode: str = "agentsd",
    recipe: Recipe | str | Path | None = None,
    seed: int = 0,
) -> AgentSDHandle:
    """Swap a U-Net's self-attention for AgentSD ("Agent Attention", ECCV 2024, Eq. 9), or do what is faster.

    No training, no change to the weights. A pipeline that is patched already gets the new recipe. A setting
    at its default changes nothing, whatever the mode; one that differs is an error where the mode or recipe
    has none of the kind.

    Args:
        pipe: a diffusers pipeline with a `unet` (or a DiT or PixArt one), or the model itself.
        ratio: share of the tokens merged away before attention, in [0, 1).
        k: weight of the `+ kV` residual, 0 to 1000.
        scale: exponent of the head width in the broadcast softmax, 0 or less.
        early_frac: share of the steps with agent attention, in [0, 1].
        mode: "agentsd": AgentSD to the letter of the paper, agents in the early steps and merged tokens
            later, in every step; images change as the paper's do. "fast": the recommended one, which keeps
            them: step caching, whose cached steps attend to downsampled keys on the residual that these
            had to full attention in the last computed steps; on grids of fewer than 2,304 tokens step
            caching alone. It has none of the four settings.
        recipe: in place of all the others, a `Recipe`, or a file or folder that holds one (`agentsd.json`;
            trained weights beside it, `agentsd.safetensors`, are loaded).
        seed: of the destinations sampled at random.

    Returns:
        A handle: `handle.remove()` undoes the patch, and so does leaving a `with apply_agentsd(pipe):` block.

    Raises:
        TypeError: `pipe` has no U-Net, or a setting has a wrong type.
        ValueError: a setting is out of range, unknown to the mode, beside a recipe, or would do nothing;
            the model has no layer to patch, or something else holds its self-attention (tomesd, a
            processor of another kind), or trained weights are to be loaded into quantised layers. The
            pipeline is left as it was.
    """
    given = {"ratio": ratio, "k": k, "scale": scale, "early_frac": early_frac, "mode": mode, "seed": seed}
    usual = inspect.signature(apply_agentsd).parameters
    changed = {name: value for name, value in given.items() if not _equal(value, usual[name].default)}
    recipe, trained = _recipe_of(recipe, mode, changed)
    unet = find_model(pipe)
    handle = AgentSDHandle(recipe, pipe, unet, trained)
    outer: AgentSDHandle | None = getattr(unet, "_agentsd", None)
    if outer is not None:
        outer._detach(unet)
    try:
        handle._attach(unet)
    except BaseException:
        handle._detach(unet)
        if outer is not None:
            outer._attach(unet)
        raise
    _handles.add(handle)
    handle._outer = outer  # for the end of a `with` block inside another
    if outer is not None and not outer._entered:
        outer._outer = None
    return handle


def _recipe_of(recipe: Any, mode: str, changed: dict[str, Any]) -> tuple[Recipe, Path | None]:
    """What is to be applied, and the folder of its trained weights; `changed` loses the mode."""
    if recipe is None:
        if changed.pop("mode", mode) not in MODES:
            raise ValueError(f"mode={mode!r}: choose {' or '.join(map(repr, MODES))}")
        recipe = MODES[mode].with_settings(**changed)
        of_agents = [name for name in ("k", "scale") if name in changed]
        if of_agents and changed.get("early_frac") == 0:
            raise ValueError(f"{of_agents[0]}={changed[of_agents[0]]!r}: early_frac=0 runs no agents")
        if mode == "agentsd":
            _say_what_it_does()
        return recipe, None
    if changed:
        raise ValueError(f"{changed} beside recipe={recipe!r}, which holds all settings: pass it alone")
    if not isinstance(recipe, Recipe | str | Path):
        kind = type(recipe).__name__
        raise TypeError(f"recipe={recipe!r} is a {kind}: pass a Recipe, or its file or folder")
    if isinstance(recipe, Recipe):
        return recipe, None
    return _load(Path(recipe))


@lru_cache(maxsize=1)  # once
def _say_what_it_does() -> None:
    logger.warning(
        'agentsd: AgentSD changes images, as in the paper; mode="fast" keeps them nearer to the model\'s own'
    )


def _equal(value: Any, other: Any) -> bool:
    return type(value) is not bool and bool(value == other)


def remove_agentsd(pipe: Any) -> None:
    """Leave a pipeline (or U-Net) as if agentsd had never been there; does nothing if it is not patched.

    A U-Net that was patched through the pipeline, and is no longer its own, is left so, too.
    """
    unet = find_model(pipe)
    handle = getattr(unet, "_agentsd", None)
    if handle is not None:
        handle._detach(unet)
    for handle in list(_handles):
        if handle.pipe is pipe:
            handle.remove()


def handle_of(pipe: Any) -> AgentSDHandle | None:
    """The handle of the recipe in force on a pipeline (or U-Net); None if it is not patched."""
    handle: AgentSDHandle | None = getattr(find_model(pipe), "_agentsd", None)
    return handle


def _load(path: Path) -> tuple[Recipe, Path | None]:
    """A saved recipe, and the folder of the weights that were saved with it, if any were."""
    recipe, folder = Recipe.load(path), path if path.is_dir() else path.parent
    needed = any(operator.needs_module for operator in recipe.operators)
    saved = (folder / WEIGHTS).exists() and (path.is_dir() or path.name == FILE_NAME or needed)
    if needed and not saved:
        raise ValueError(
            f"recipe={str(path)!r} has an operator that is trained, and {folder} holds no {WEIGHTS}: "
            "AgentSDHandle.save writes both; pass Recipe.load(path) to train it anew"
        )
    return recipe, folder if saved else None
