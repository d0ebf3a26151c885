"""Apply a recipe to a live pipeline, and take it away again."""

from __future__ import annotations

import inspect
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.nn import Module

from .attention import Agents
from .attention.operator import MODULE
from .attention.processor import LayerState, is_ours
from .cache.plan import StepKind
from .denoiser_hook import DenoiserHook
from .hosts.models import (
    EVERY_LEVEL,
    AttentionLayer,
    find_attention_layers,
    find_model,
    is_plain,
    is_tomesd_block,
)
from .layers import Group
from .modules.adapter import FILE_NAME as WEIGHTS
from .modules.adapter import (
    LoadedWeights,
    build_module,
    check_fit,
    check_plain,
    read_weights,
    save_weights,
    weights_of,
)
from .modules.operators import TrainedOperator
from .recipe import FILE_NAME, MODES, Recipe
from .schedule import Phases, stages_of


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
    """Make a Stable Diffusion U-Net faster by step caching and agent attention on shared residuals.

    No training, no change to the weights. A pipeline that is patched already gets the new recipe. A setting
    at its default changes nothing, whatever the mode; one that differs is an error where the mode or recipe
    has none of the kind.

    Args:
        pipe: a diffusers pipeline with a `unet` (or a DiT or PixArt one), or the model itself.
        ratio: share of the tokens merged away before attention, in [0, 1).
        k: weight of the `+ kV` residual, 0 to 1000.
        scale: exponent of the head width in the broadcast softmax, 0 or less.
        early_frac: share of the steps with agent attention, in [0, 1].
        mode: "agentsd": step caching, whose cached steps run agent attention early in a run and downsampled
            keys later, each on the residual that it had to full attention in the last computed steps; on
            grids of fewer than 4,096 tokens step caching alone. "downsample": the same with downsampled keys
            in place of agents. "step-caching": step caching alone, on every grid. "paper": AgentSD to the
            letter of the paper, agents in the early steps and merged tokens later, in every step.
        recipe: in place of all the others, a `Recipe`, or a folder or file that holds one (`agentsd.yaml`;
            trained weights beside it, `agentsd.safetensors`, are loaded).
        seed: of the cells drawn at random.

    Returns:
        A handle: `handle.remove()` undoes the patch, and so does leaving a `with apply_agentsd(pipe):` block.

    Raises:
        TypeError: `pipe` has no U-Net, or a setting has a wrong type.
        ValueError: a setting is out of range, unknown to the mode or beside a recipe; the model has no layer
            to patch, or something else holds its self-attention (tomesd, a processor of another kind), or
            trained weights are to be loaded into quantised layers. The pipeline is left as it was.
    """
    given = {"ratio": ratio, "k": k, "scale": scale, "early_frac": early_frac, "mode": mode, "seed": seed}
    usual = inspect.signature(apply_agentsd).parameters
    changed = {name: value for name, value in given.items() if not _equal(value, usual[name].default)}
    trained = None
    if recipe is not None:
        if changed:
            raise ValueError(f"{changed} beside recipe={recipe!r}, which holds all settings: pass it alone")
        if not isinstance(recipe, Recipe | str | Path):
            kind = type(recipe).__name__
            raise TypeError(f"recipe={recipe!r} is a {kind}: pass a Recipe, or its file or folder")
        if not isinstance(recipe, Recipe):
            recipe, trained = _load(Path(recipe))
    else:
        if changed.pop("mode", mode) not in MODES:
            raise ValueError(f"mode={mode!r}: choose {' or '.join(map(repr, MODES))}")
        recipe = MODES[mode].with_settings(**changed)
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
    handle._outer = outer  # for the end of a `with` block inside another
    if outer is not None and not outer._entered:
        outer._outer = None
    return handle


def _equal(value: Any, other: Any) -> bool:
    return type(value) is not bool and bool(value == other)


def remove_agentsd(pipe: Any) -> None:
    """Leave a pipeline (or U-Net) as if agentsd had never been there; does nothing if it is not patched."""
    unet = find_model(pipe)
    handle = getattr(unet, "_agentsd", None)
    if handle is not None:
        handle._detach(unet)


def handle_of(pipe: Any) -> AgentSDHandle | None:
    """The handle of the recipe in force on a pipeline (or U-Net); None if it is not patched."""
    handle: AgentSDHandle | None = getattr(find_model(pipe), "_agentsd", None)
    return handle


class AgentSDHandle:
    """What `apply_agentsd` returns: the recipe, the patched layers, and the way back.

    Attributes:
        recipe: the recipe in force.
        layer_names: names of the patched self-attention layers.
    """

    def __init__(self, recipe: Recipe, pipe: Any, unet: Any, trained: Path | None = None) -> None:
        """Make all that is needed; nothing is changed yet."""
        sites = _sites_of(unet, recipe)
        for site in sites:
            _check_free(site)
        self.recipe = recipe
        self.layer_names = [site.name for site in sites]
        self._sites = sites
        self._layers: list[LayerState] = []
        self._groups: list[Group] = []
        self._cores: list[Module | None] = []
        self._make_groups(unet)
        self._trained = None
        if trained is not None:
            self._trained = read_weights(trained)
            check_fit(self._named_layers(), self._trained, trained / WEIGHTS)
        owner = None if pipe is unet or isinstance(pipe, Module) else pipe
        compiled = pipe if isinstance(pipe, Module) and pipe is not unet else None
        self._hook = DenoiserHook(recipe, unet, owner, self._sites, self._layers, self._groups, compiled)
        self._unet: weakref.ref[Module] | None = None
        self._outer: AgentSDHandle | None = None
        self._entered = False
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._loaded: LoadedWeights | None = None

    def _make_groups(self, unet: Any) -> None:
        recipe = self.recipe
        finest = min((site.downsampling_factor for site in self._sites), default=1)
        groups: dict[Any, Group] = {}
        for i, site in enumerate(self._sites):
            stages = stages_of(recipe.attention if recipe.layers is None else recipe.layers[site.name])
            operators = [stage for stage in stages if stage is not None]
            own = any(operator.own_ranking for operator in operators)
            group = Group(site, i, stages, site.downsampling_factor // finest, recipe.seed)
            group = groups.setdefault(i if own else (site.downsampling_factor, stages), group)
            self._layers.append(LayerState(site.name, group.work))
            trained = [operator for operator in operators if isinstance(operator, TrainedOperator)]
            self._cores.append(build_module(site, trained[0], recipe.seed, unet) if trained else None)
        self._groups.extend(groups.values())

    def remove(self) -> None:
        """Undo this patch; nothing happens if it was undone or replaced before."""
        unet = self._unet() if self._unet is not None else None
        if unet is not None and getattr(unet, "_agentsd", None) is self:
            self._detach(unet)

    def parameters(self) -> list[torch.nn.Parameter]:
        """What to train: the patched layers' projections and, where the recipe has one, their module.

        Raises:
            ValueError: a projection is quantised, or the recipe shares residuals.
        """
        if (residual := self.recipe.residual) is not None:
            raise ValueError(
                f"residual={residual}: nothing is shared in training, train the recipe without it"
            )
        check_plain(self._named_layers(), "train the model unquantised")
        return list(weights_of(self._named_layers()).values())

    def save(self, folder: str | Path) -> None:
        """Write the recipe and the patched layers' weights, for `apply_agentsd(pipe, recipe=folder)`.

        Raises:
            ValueError: a projection is quantised.
        """
        check_plain(self._named_layers(), "handle.recipe.save(folder) writes the recipe without weights")
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.recipe.save(folder)
        save_weights(self._named_layers(), folder)

    def reset(self) -> None:
        """Forget what was kept of the thread's last calls, so that the next one begins a run.

        Pipelines need none of it. A loop by hand that breaks off and goes on with another image on the same
        list of timesteps calls this, or `scheduler.set_timesteps`, which tells runs apart.
        """
        self._hook.reset()

    def summary(self) -> str:
        """What each call of the last run was: a letter a call, and counts.

        F is a computed step and f a cached one, which computes the last layers alone; H and h are those of
        the conditional pass alone.
        """
        return self._hook.summary()

    @property
    def last_run(self) -> list[StepKind]:
        """What each call of the last run was: all layers computed or not, both passes of guidance or not, and
        whether attention was full or added a shared residual."""
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
        self._hook.reset()
        self._hook.enabled = bool(value)

    def __enter__(self) -> AgentSDHandle:
        self._entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        unet = self._unet() if self._unet is not None else None
        if unet is None or getattr(unet, "_agentsd", None) is not self:
            return
        self._detach(unet)
        if self._outer is not None:
            self._outer._attach(unet)

    def __repr__(self) -> str:
        return f"AgentSDHandle({self.recipe}, {len(self.layer_names)} layers)"

    def __getstate__(self) -> dict[str, Any]:
        unet = self._unet() if self._unet is not None else None
        return self.__dict__ | {"_outer": None, "_unet": unet}

    def __setstate__(self, state: dict[str, Any]) -> None:
        unet = state["_unet"]  # the copy that this handle is a copy's part of
        self.__dict__ |= state | {"_unet": None if unet is None else weakref.ref(unet)}

    def _named_layers(self) -> list[tuple[str, Any, Module | None]]:
        return [(s.name, s.attn, core) for s, core in zip(self._sites, self._cores, strict=True)]

    def _attach(self, unet: Any) -> None:
        self._unet = weakref.ref(unet)
        unet._agentsd = self
        for site, layer, core in zip(self._sites, self._layers, self._cores, strict=True):
            attn: Any = site.attn
            attn._agentsd = layer
            self._hook.layers.claim(attn, layer)
            if core is not None:
                attn.add_module(MODULE, core)
            self._hooks.append(site.block.norm1.register_forward_pre_hook(layer.see))
        if self._trained is not None:
            self._loaded = LoadedWeights(self._named_layers(), self._trained)
        cache = self._hook.cache
        if cache is not None:
            unet._reset_stateful_cache = self._hook.reset
            if cache.skipped is not None:
                self._hooks.append(cache.skipped.hook())
        self._hooks.append(unet.register_forward_pre_hook(self._hook.begin, with_kwargs=True))
        self._hooks.append(unet.register_forward_hook(self._hook.end, always_call=True))

    def _check_undoable(self) -> None:
        """Raise ValueError where what loaded weights took the place of can't be put back."""
        if self._loaded is not None:
            way_out = "trained weights were loaded before, and can't be taken out again: load the model anew"
            check_plain(self._named_layers(), way_out)

    def _detach(self, unet: Any) -> None:
        """Undo an attachment, also one that broke off."""
        self._check_undoable()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._hook.detach()
        if self._hook.cache is not None:
            vars(unet).pop("_reset_stateful_cache", None)
        if self._loaded is not None:
            self._loaded.restore(self._named_layers())
            self._loaded = None
        for site, layer in zip(self._sites, self._layers, strict=True):
            attn: Any = site.attn
            if not hasattr(attn, "_agentsd"):
                continue
            if hasattr(attn, MODULE):
                delattr(attn, MODULE)
            if is_ours(attn.processor):
                attn.set_processor(attn.processor.fallback)
            del attn._agentsd
            layer.work.plan = None
        # fuse_qkv_projections keeps the processors it found, to put them back
        kept = getattr(unet, "original_attn_processors", None)
        if kept:
            unet.original_attn_processors = {name: _unwrapped(p) for name, p in kept.items()}
        if hasattr(unet, "_agentsd"):
            del unet._agentsd


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


def _sites_of(unet: Any, recipe: Recipe) -> list[AttentionLayer]:
    """The layers that a recipe speaks of; raises ValueError for one that the model lacks."""
    if recipe.layers is None:
        if recipe.attention is None:
            return []
        return find_attention_layers(unet, recipe.levels or 2, at_most=recipe.levels is None)
    every = find_attention_layers(unet, EVERY_LEVEL, at_most=True)
    if missing := sorted(set(recipe.layers) - {site.name for site in every}):
        raise ValueError(f"layers={missing}: {type(unet).__name__} has no such self-attention layer")
    return [site for site in every if site.name in recipe.layers]


def _unwrapped(processor: Any) -> Any:
    return processor.fallback if is_ours(processor) else processor


def _check_free(site: AttentionLayer) -> None:
    if is_tomesd_block(site.block):
        raise ValueError(f"{site.name} is patched by tomesd: call tomesd.remove_patch(pipe) first")
    processor = _unwrapped(site.attn.processor)
    if not is_plain(processor):
        raise ValueError(
            f"{site.name} has a {type(processor).__name__}, which agent attention would replace: "
            "set it to AttnProcessor2_0 first (unet.set_attn_processor), or leave this pipeline unpatched"
        )
