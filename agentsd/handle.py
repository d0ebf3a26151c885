"""The handle of a patched pipeline: attach, detach, enabled, last_run; it knows nothing of a call."""

from __future__ import annotations

import weakref
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.nn import Module, Parameter

from .cache.plan import StepKind
from .denoiser_hook import DenoiserHook, WarnOnce
from .layers import PatchedLayers, fallback_of
from .modules.adapter import (
    FILE_NAME,
    LoadedWeights,
    check_fit,
    check_plain,
    read_weights,
    resize_loaded,
    save_weights,
    weights_of,
)
from .recipe import Recipe
from .serialization import changed_text


class AgentSDHandle:
    """What `apply_agentsd` returns: the recipe, the patched layers, and the way back.

    Attributes:
        recipe: the recipe in force.
        layer_names: names of the patched self-attention layers.
    """

    def __init__(self, recipe: Recipe, pipe: Any, unet: Any, trained: Path | None = None) -> None:
        """Make all that is needed; nothing is changed yet."""
        warn = WarnOnce()
        self.recipe = recipe
        self._layers = PatchedLayers(unet, recipe, warn)
        self.layer_names = [name for name, _, _ in self._layers.named]
        self._trained = None
        if trained is not None:
            self._trained = resize_loaded(self._layers.named, read_weights(trained))
            check_fit(self._layers.named, self._trained, trained / FILE_NAME)
        elif not unet.training and (untrained := [one.name for one in recipe.operators if one.needs_module]):
            warn(
                f"agentsd: {untrained[0]} is untrained, and may spoil images: train it (agentsd-dreambooth "
                "--attention), or apply the folder that its weights were saved in"
            )
        self._hook = DenoiserHook(recipe, unet, pipe, self._layers, warn)
        self._unet: weakref.ref[Module] | None = None
        self._outer: AgentSDHandle | None = None
        self._entered = self._left = False
        self._hooks: list[Any] = []
        self._loaded: LoadedWeights | None = None

    def _patched(self) -> Any:
        """The U-Net, where this handle is in force on it."""
        unet = self._unet() if self._unet is not None else None
        return unet if getattr(unet, "_agentsd", None) is self else None

    @property
    def pipe(self) -> Any:
        """The pipeline that was patched, or what wraps the U-Net; None for a bare U-Net."""
        return self._hook.pipe

    def remove(self) -> None:
        """Undo this patch; nothing happens if it was undone or replaced before."""
        self._left = True
        if (unet := self._patched()) is not None:
            self._detach(unet)

    def parameters(self) -> list[Parameter]:
        """What to train: the patched layers' projections and, where the recipe has one, their module.

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
        """Forget every run, of all threads, and what an interrupted call was at: the next call begins a run.

        Pipelines need none of it. A loop by hand that breaks off and goes on with another image on the same
        list of timesteps calls this, or `scheduler.set_timesteps`, which tells runs apart.
        """
        self._hook.clean()

    def summary(self) -> str:
        """What each call of the last run was: a letter a call, and counts.

        F is a computed step and f a cached one, which computes the last layers alone.
        """
        return self._hook.summary()

    @property
    def last_run(self) -> list[StepKind]:
        """What each call of the last run was: all layers computed or not, and whether attention was "full",
        the "operator", or that on a shared residual ("share")."""
        return self._hook.history()

    @property
    def enabled(self) -> bool:
        """Whether the recipe runs. At False the pipeline is the baseline until it is True again.

        Raises:
            ValueError: it is set to False where trained weights are loaded, which would stay.
        """
        return self._hook.enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        if not value and self._loaded is not None:
            raise ValueError("enabled=False: the trained weights would stay, call handle.remove() instead")
        self._hook.switch(bool(value))

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
            while outer is not None and outer._left:  # in another order than blocks are nested in
                outer = outer._outer
            if outer is not None:
                outer._attach(unet)

    def __repr__(self) -> str:
        return f"AgentSDHandle({changed_text(self.recipe)}, {len(self.layer_names)} layers)"

    def __getstate__(self) -> dict[str, Any]:
        unet = self._unet() if self._unet is not None else None
        return self.__dict__ | {"_outer": None, "_unet": unet}

    def __setstate__(self, state: dict[str, Any]) -> None:
        unet = state["_unet"]  # the copy that this handle is a copy's part of
        self.__dict__ |= state | {"_unet": None if unet is None else weakref.ref(unet)}

    def _attach(self, unet: Any) -> None:
        self._unet = weakref.ref(unet)
        unet._agentsd = self
        self._layers.attach()
        if self._trained is not None:
            self._loaded = LoadedWeights(self._layers.named, self._trained)
        cache = self._hook.cache
        if cache is not None:
            unet._reset_stateful_cache = self._hook.end_run
            if cache.skipped is not None:
                self._hooks.append(cache.skipped.hook())
        self._hooks.append(unet.register_forward_pre_hook(self._hook.begin, with_kwargs=True))
        self._hooks.append(unet.register_forward_hook(self._hook.end, always_call=True))

    def _detach(self, unet: Any) -> None:
        """Undo an attachment, also one that broke off.

        Raises:
            ValueError: what loaded weights took the place of can't be put back.
        """
        if self._loaded is not None:
            way_out = "trained weights were loaded before, and can't be taken out again: load the model anew"
            check_plain(self._layers.named, way_out)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._hook.clean()
        if self._hook.cache is not None:
            vars(unet).pop("_reset_stateful_cache", None)
        if self._loaded is not None:
            self._loaded.restore(self._layers.named)
            self._loaded = None
        self._layers.detach()
        # fuse_qkv_projections keeps the processors it found, to put them back
        kept = getattr(unet, "original_attn_processors", None)
        if kept:
            unet.original_attn_processors = {name: fallback_of(p) for name, p in kept.items()}
        if hasattr(unet, "_agentsd"):
            del unet._agentsd
