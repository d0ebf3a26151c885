"""Apply a recipe to a live pipeline, and remove it again."""

from __future__ import annotations

import inspect
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import WeakSet

from diffusers.utils import logging
from torch.nn import Module, Parameter

from .attention import Agents
from .hook import Hook
from .hosts import find_model, remove_hooks
from .layers import PatchedLayers
from .modules.adapter import FILE_NAME as WEIGHTS
from .modules.adapter import (
    LoadedWeights,
    check_fit,
    check_plain,
    read_weights,
    resize_loaded,
    save_weights,
    weights_of,
)
from .plan import CallKind
from .recipe import FILE_NAME, MODES, Phases, Recipe, changed_text
from .warn import WarnOnce

logger = logging.get_logger(__name__)


class AgentSDHandle:
    """What `apply_agentsd` returns: the recipe, the patched layers, and the way back.

    Attributes:
        recipe: the recipe in force.
        layer_names: names of the patched self-attention layers.
    """

    def __init__(self, recipe: Recipe, pipe: Any, unet: Any, trained: Path | None = None) -> None:
        """Prepare everything; change nothing yet."""
        warn = WarnOnce(logger)
        self.recipe = recipe
        self._layers = PatchedLayers(unet, recipe, warn)
        self.layer_names = [name for name, _, _ in self._layers.named]
        self._trained = None
        if trained is not None:
            self._trained = resize_loaded(self._layers.named, read_weights(trained))
            check_fit(self._layers.named, self._trained, trained / WEIGHTS)
        elif not unet.training and (untrained := [one.name for one in recipe.operators if one.needs_module]):
            warn(
                f"{untrained[0]} is untrained, and may spoil images: train it (agentsd-dreambooth "
                "--attention), or apply the folder that its weights were saved in"
            )
        self._hook = Hook(recipe, unet, pipe, self._layers)
        self._unet: weakref.ref[Module] | None = None
        self._outer: AgentSDHandle | None = None
        self._entered = self._left = False
        self._loaded: LoadedWeights | None = None

    def _patched(self) -> Any:
        """The U-Net, if this handle is in force on it."""
        unet = self._unet() if self._unet is not None else None
        return unet if getattr(unet, "_agentsd", None) is self else None

    @property
    def pipe(self) -> Any:
        """The pipeline that was patched, or what wraps the U-Net; None for a bare U-Net."""
        return self._hook.runs.pipe

    def remove(self) -> None:
        """Undo this patch. If it was undone or replaced before, nothing happens."""
        self._left = True
        if (unet := self._patched()) is not None:
            self._detach(unet)

    def parameters(self) -> list[Parameter]:
        """Return what to train: the patched layers' projections, and their modules if the recipe has them.

        Raises:
            ValueError: a projection is quantised, or the recipe shares residuals.
        """
        if (residual := self.recipe.residual) is not None:
            raise ValueError(
                f"residual={residual}: nothing is shared in training, train the recipe without it"
            )
        check_plain(self._layers.named, "train the model unquantised")
        return list(weights_of(self._layers.named).values())

    def save(self, folder: str | Path) -> None:
        """Write the recipe and the patched layers' weights, for `apply_agentsd(pipe, recipe=folder)`.

        Raises:
            ValueError: a projection is quantised.
        """
        check_plain(self._layers.named, "handle.recipe.save(folder) writes the recipe without weights")
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.recipe.save(folder)
        save_weights(self._layers.named, folder)

    def reset(self) -> None:
        """Forget all runs of all threads, and undo an interrupted call. The next call begins a run.

        Pipelines don't need this. A hand-written loop needs it if it breaks off and starts another image on
        the same timesteps; `scheduler.set_timesteps` has the same effect.
        """
        self._hook.clean(self._patched())

    def summary(self) -> str:
        """Return the calls of the last run as text: one letter for each, and counts.

        F is a full call. f is a cached one, which computes only the last layers.
        """
        return self._hook.runs.history.describe()

    @property
    def last_run(self) -> list[CallKind]:
        """The kind of each call of the last run.

        That is whether it computed all layers, and whether attention was "full", the "operator", or the
        operator on a shared residual ("share").
        """
        return list(self._hook.runs.history.kinds)

    @property
    def enabled(self) -> bool:
        """Whether the recipe runs. While it is False, the pipeline runs as if it were not patched.

        Raises:
            ValueError: it is set to False while trained weights are loaded, which would stay in force.
        """
        return self._hook.enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        if not value and self._loaded is not None:
            raise ValueError("enabled=False: the trained weights would stay, call handle.remove() instead")
        self._hook.enabled = bool(value)
        self._hook.clean(self._patched())  # the next call begins a run

    def __enter__(self) -> AgentSDHandle:
        self._entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left = True
        if (unet := self._patched()) is not None:
            self._detach(unet)
            outer = self._outer
            while outer is not None and outer._left:  # blocks may end in another order than they are nested
                outer = outer._outer
            if outer is not None:
                outer._attach(unet)

    def __repr__(self) -> str:
        return f"AgentSDHandle({changed_text(self.recipe)}, {len(self.layer_names)} layers)"

    def __getstate__(self) -> dict[str, Any]:
        unet = self._unet() if self._unet is not None else None
        return self.__dict__ | {"_outer": None, "_unet": unet}

    def __setstate__(self, state: dict[str, Any]) -> None:
        unet = state["_unet"]  # the copied U-Net
        self.__dict__ |= state | {"_unet": None if unet is None else weakref.ref(unet)}

    def _attach(self, unet: Any) -> None:
        self._unet = weakref.ref(unet)
        unet._agentsd = self
        self._layers.attach()
        if self._trained is not None:
            self._loaded = LoadedWeights(self._layers.named, self._trained)
        if self._hook.caches:
            unet._reset_stateful_cache = self._hook.runs.end
        self._hook.skipped.attach()
        unet.register_forward_pre_hook(self._hook.begin, with_kwargs=True)
        unet.register_forward_hook(self._hook.end, always_call=True)

    def _detach(self, unet: Any) -> None:
        """Undo `_attach`, also if it was interrupted.

        Raises:
            ValueError: the weights that trained ones replaced can't be restored.
        """
        if self._loaded is not None:
            way_out = "trained weights were loaded before, and can't be taken out again: load the model anew"
            check_plain(self._layers.named, way_out)
        remove_hooks(unet, self._hook.begin, self._hook.end)
        self._hook.skipped.detach()
        self._hook.clean(unet)
        if self._hook.caches:
            vars(unet).pop("_reset_stateful_cache", None)
        if self._loaded is not None:
            self._loaded.restore(self._layers.named)
            self._loaded = None
        self._layers.detach()
        if hasattr(unet, "_agentsd"):
            del unet._agentsd


_warn_once = WarnOnce(logger)
"""Warns once for all pipelines together."""
_handles: WeakSet[AgentSDHandle] = WeakSet()
"""All living handles. They are needed because a pipeline's U-Net may be exchanged after it was patched."""


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
    """Make a diffusers pipeline faster: with AgentSD ("Agent Attention", ECCV 2024, Eq. 9) or step caching.

    Nothing is trained and no weight is changed. If the pipeline is patched already, the new recipe replaces
    the old one. A setting at its default is ignored if the mode doesn't have it; any other value is an error.

    Args:
        pipe: a diffusers pipeline with a `unet` (or a DiT or PixArt pipeline), or the model itself.
        ratio: share of the tokens merged away before attention, 0 to 0.75.
        k: weight of the `+ kV` residual, 0 to 1000.
        scale: exponent of the head width in the broadcast softmax, 0 or less.
        early_frac: share of the steps with agent attention, in [0, 1].
        mode: "agentsd" is AgentSD to the letter of the paper: agents in the early steps, merged tokens in
            the later ones. It changes images as the paper's method does. "fast" is recommended: step
            caching, which keeps images close to the original. From 2,304 tokens on (384 px in SD 1.5), its
            cached steps attend to downsampled keys and add the residual to full attention that full
            steps had. "fast" has none of the four settings above.
        recipe: instead of all other settings, a `Recipe`, or a file or folder that holds one
            (`agentsd.json`). Trained weights beside it (`agentsd.safetensors`) are loaded.
        seed: seed of the randomly sampled destination tokens.

    Returns:
        A handle: `handle.remove()` undoes the patch, and so does leaving a `with apply_agentsd(pipe):` block.

    Raises:
        TypeError: `pipe` has no U-Net, or a setting has a wrong type.
        ValueError: a setting is out of range, unknown to the mode, given beside a recipe, or would do
            nothing; the model has no layer to patch; another package has patched its self-attention
            (tomesd, another kind of processor); or trained weights would go into quantised layers. The
            pipeline is left as it was.
    """
    given = {"ratio": ratio, "k": k, "scale": scale, "early_frac": early_frac, "mode": mode, "seed": seed}
    usual = inspect.signature(apply_agentsd).parameters
    changed = {name: value for name, value in given.items() if not _equal(value, usual[name].default)}
    recipe, trained = _recipe_of(recipe, mode, changed)
    unet = find_model(pipe)
    outer: AgentSDHandle | None = getattr(unet, "_agentsd", None)
    if outer is not None:
        outer._hook.undo_interrupted(unet)  # otherwise its processors look like another package's
    handle = AgentSDHandle(recipe, pipe, unet, trained)
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
    handle._outer = outer  # restored at the end of a nested `with` block
    if outer is not None and not outer._entered:
        outer._outer = None
    return handle


def _recipe_of(recipe: Any, mode: str, changed: dict[str, Any]) -> tuple[Recipe, Path | None]:
    """Return the recipe to apply, and the folder of its trained weights; `changed` loses the mode."""
    for name, value in (("ratio", changed.get("ratio")), ("recipe", recipe)):
        if isinstance(value, str) and value in MODES and not Path(value).exists():
            raise ValueError(f"{name}={value!r} is a mode: pass mode={value!r}")
    if recipe is None:
        if changed.pop("mode", mode) not in MODES:
            raise ValueError(f"mode={mode!r}: choose {' or '.join(map(repr, MODES))}")
        recipe = MODES[mode].with_settings(**changed)
        of_agents = [name for name in ("k", "scale") if name in changed]
        if of_agents and changed.get("early_frac") == 0:
            raise ValueError(f"{of_agents[0]}={changed[of_agents[0]]!r}: early_frac=0 runs no agents")
        if mode == "agentsd":
            _warn_once(
                'AgentSD changes images, as in the paper; mode="fast" keeps them nearer to the model\'s own'
            )
        return recipe, None
    if changed:
        told = ", ".join(f"{name}={value!r}" for name, value in changed.items())
        raise ValueError(f"{told} beside recipe=, which holds all settings: pass the recipe alone")
    if not isinstance(recipe, Recipe | str | Path):
        raise TypeError(f"recipe={recipe!r}: pass a Recipe, or its file or folder")
    if isinstance(recipe, Recipe):
        return recipe, None
    return _load(Path(recipe))


def _equal(value: Any, other: Any) -> bool:
    return type(value) is not bool and bool(value == other)


def remove_agentsd(pipe: Any) -> None:
    """Restore a pipeline (or U-Net) bit for bit; if it is not patched, do nothing.

    A U-Net that was patched through this pipeline and has been exchanged since is restored as well.
    """
    handles: list[AgentSDHandle | None] = [handle for handle in _handles if handle.pipe is pipe]
    try:
        handles.append(handle_of(pipe))
    except TypeError:  # it has no U-Net (any more); one that was patched through it is still restored
        if not handles and getattr(pipe, "unet", None) is None:
            raise
    for handle in handles:
        if handle is not None:
            handle.remove()


def handle_of(pipe: Any) -> AgentSDHandle | None:
    """Return the handle in force on a pipeline (or U-Net); None if it is not patched."""
    handle: AgentSDHandle | None = getattr(find_model(pipe), "_agentsd", None)
    return handle


def _load(path: Path) -> tuple[Recipe, Path | None]:
    """Return a saved recipe, and the folder of the weights saved with it, if any."""
    recipe, folder = Recipe.load(path), path if path.is_dir() else path.parent
    needed = any(operator.needs_module for operator in recipe.operators)
    saved = (folder / WEIGHTS).exists() and (path.is_dir() or path.name == FILE_NAME or needed)
    if needed and not saved:
        raise ValueError(
            f"recipe={str(path)!r} has an operator that is trained, and {folder} holds no {WEIGHTS}: "
            "AgentSDHandle.save writes both; pass Recipe.load(path) to train it anew"
        )
    return recipe, folder if saved else None
