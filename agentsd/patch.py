"""Apply a recipe to a live pipeline, and take it away again."""

from __future__ import annotations

import threading
import warnings
import weakref
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from .attention.operator import CORE, Operator, Place, Plan
from .attention.pooled import PooledAgents
from .attention.processor import AgentAttnProcessor, LayerState, Work, is_ours
from .hosts import (
    EVERY_LEVEL,
    Site,
    checkpoints,
    find_model,
    find_sites,
    is_plain,
    is_tomesd_block,
    latent_and_timestep,
)
from .modules.adapter import FILE_NAME as WEIGHTS
from .modules.adapter import LoadedWeights, build_core, check_fit, read_weights, save_weights, weights_of
from .modules.operators import TrainedOperator
from .recipe import FAST, MODES, ByDistance, Phases, Recipe, stages_of
from .steps.distance import LatentDistance
from .steps.run import RunReader, Step


class _Unset:
    """What an argument is that was not passed; None is refused."""

    def __repr__(self) -> str:
        return "<not passed>"


UNSET: Any = _Unset()


def apply_agentsd(
    pipe: Any,
    ratio: float = UNSET,
    k: float = UNSET,
    scale: float = UNSET,
    early_frac: float = UNSET,
    *,
    mode: str = UNSET,
    recipe: Recipe | str | Path = UNSET,
    seed: int = UNSET,
) -> AgentHandle:
    """Make a Stable Diffusion U-Net faster by a recipe; the default runs agent attention.

    No training, no change to the weights. A pipeline that is patched already gets the new recipe.

    Args:
        pipe: a diffusers pipeline with a `unet` (or a DiT or PixArt one), or the model itself.
        ratio: share of the tokens merged away before attention, in [0, 1); 0.4 if not passed.
        k: weight of the `+ kV` residual; 0.075 if not passed.
        scale: exponent of the head width in the broadcast softmax; -0.15 if not passed.
        early_frac: share of the steps with agent attention, in [0, 1]; 0.4 if not passed.
        mode: a recipe by name: "fast" (the default), "exact" (the paper to the letter), "turbo" or
            "downsample". The settings above override that recipe's.
        recipe: in place of all the others, a `Recipe`, or a file or folder that holds one (`agentsd.yaml`;
            trained weights beside it, `agentsd.safetensors`, are loaded).
        seed: of the cells drawn at random; 0 if not passed.

    Returns:
        A handle: `handle.remove()` undoes the patch, and so does leaving a `with apply_agentsd(pipe):` block.

    Raises:
        TypeError: `pipe` has no U-Net, or a setting has a wrong type.
        ValueError: a setting is out of range, unknown to the recipe or beside one; the model has no layer
            to patch, or something else holds its self-attention (tomesd, a processor of another kind). The
            pipeline is left as it was.
    """
    named = {"ratio": ratio, "k": k, "scale": scale, "early_frac": early_frac, "seed": seed}
    settings = {name: value for name, value in named.items() if value is not UNSET}
    trained = None
    if recipe is not UNSET:
        beside = settings | ({} if mode is UNSET else {"mode": mode})
        if beside:
            raise ValueError(f"{beside} beside recipe={recipe!r}, which holds all settings: pass it alone")
        if not isinstance(recipe, Recipe | str | Path):
            kind = type(recipe).__name__
            raise TypeError(f"recipe={recipe!r} is a {kind}: pass a Recipe, or its file or folder")
        if not isinstance(recipe, Recipe):
            trained = Path(recipe) if (Path(recipe) / WEIGHTS).exists() else None
            recipe = Recipe.load(recipe)
    else:
        if mode is not UNSET and mode not in MODES:
            raise ValueError(f"mode={mode!r}: choose {' or '.join(map(repr, MODES))}")
        recipe = (FAST if mode is UNSET else MODES[mode]).with_settings(**settings)
    unet = find_model(pipe)
    handle = AgentHandle(recipe, pipe, unet, trained)
    outer: AgentHandle | None = getattr(unet, "_agentsd", None)
    if outer is not None:
        outer._detach(unet)
    try:
        handle._attach(unet)
    except BaseException:
        handle._detach(unet)
        if outer is not None:
            outer._attach(unet)
        raise
    handle._outer = outer
    return handle


def remove_agentsd(pipe: Any) -> None:
    """Leave a pipeline (or U-Net) as if agentsd had never been there; does nothing if it is not patched."""
    unet = find_model(pipe)
    handle = getattr(unet, "_agentsd", None)
    if handle is not None:
        handle._detach(unet)


@dataclass
class Group:
    """Layers on one token grid that share a plan: a whole level, or one layer that makes its own.

    Attributes:
        site: the group's first layer.
        index: its number; part of the key of its random cells.
        stages: what it runs in each stage of a run.
        coarseness: side of its tokens, in tokens of the finest patched level.
        seed: of the random cells.
        work: of the call under way.
    """

    site: Site
    index: int
    stages: tuple[Operator | None, ...]
    coarseness: int
    seed: int
    work: Work = field(default_factory=Work)

    def begin(self, latent: Tensor, timestep: float, stages: tuple[int, ...]) -> None:
        """Make the plan of a call on a latent (B, ..., H, W), whose images are in these stages."""
        grid = self.site.grid(latent)
        frames = latent.shape[2] if latent.ndim == 5 else 1  # a video's frames are images to the layers
        each = [self.stages[stage if len(self.stages) > 1 else 0] for stage in stages for _ in range(frames)]
        key = (self.seed, self.index, timestep)
        place = Place(grid, self.coarseness, latent.shape[0] * frames, latent.device, key)
        self.work.grid = grid
        operator = each[0]
        if len(set(each)) > 1 and isinstance(operator, PooledAgents):
            every = [stage for stage in self.stages if isinstance(stage, PooledAgents)]
            self.work.plan = operator.plan_each(place, each, every)  # type: ignore[arg-type]
        else:
            self.work.plan = None if operator is None else operator.plan(place)


class _Run(threading.local):
    """A thread's run: where it is, and how far its latents moved."""

    def __init__(self, timing: Phases | ByDistance | None) -> None:
        self.timing = timing
        self.reader = RunReader(timing.early_frac if isinstance(timing, Phases) else 0.0)
        self.distance = None
        if isinstance(timing, ByDistance):
            self.distance = LatentDistance(timing.thresholds, timing.per == "sample")

    def __reduce__(self) -> tuple[Any, ...]:  # a copy begins anew
        return _Run, (self.timing,)

    def stages(self, step: Step, latent: Tensor) -> tuple[int, ...]:
        """The stage of each image."""
        if self.distance is not None:
            return self.distance.read(latent, step.opens, step.repeats)
        return (0 if step.early or self.timing is None else 1,) * latent.shape[0]


class _Graph:
    """Lives as long as a call's graph does; `computed` once its backward has begun."""

    computed = False

    def begin(self, grad: Tensor) -> None:
        """Hook of the output's gradient."""
        self.computed = True


class AgentHandle:
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
        self._pipe = None if pipe is unet or isinstance(pipe, Module) else weakref.ref(pipe)
        self._scheduler: Any = None
        self._unet: weakref.ref[Module] | None = None
        self._outer: AgentHandle | None = None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._loaded: LoadedWeights | None = None
        self._rules = [rule for rule in (recipe.steps, recipe.guidance) if rule is not None]
        self._run = _Run(recipe.timing)
        self._caller: dict[str, int] = {}
        self._step: Step | None = None
        self._call: ExitStack | None = None  # what is set for the U-Net call under way
        self._recomputes = False
        self._awaited: weakref.ref[_Graph] | None = None
        self._kept: list[Plan | None] = []  # of a call whose backward is still to come
        self._said: set[str] = set()

    def _make_groups(self, unet: Any) -> None:
        recipe = self.recipe
        finest = min((site.span for site in self._sites), default=1)
        groups: dict[Any, Group] = {}
        for i, site in enumerate(self._sites):
            stages = stages_of(recipe.attention if recipe.layers is None else recipe.layers[site.name])
            operators = [stage for stage in stages if stage is not None]
            own = any(operator.own_ranking for operator in operators)
            group = Group(site, i, stages, site.span // finest, recipe.seed)
            group = groups.setdefault(i if own else (site.span, stages), group)
            self._layers.append(LayerState(site.name, group.work))
            trained = [operator for operator in operators if isinstance(operator, TrainedOperator)]
            self._cores.append(build_core(site, trained[0], recipe.seed, unet) if trained else None)
        self._groups = list(groups.values())

    def remove(self) -> None:
        """Undo this patch; nothing happens if it was undone or replaced before."""
        unet = self._unet() if self._unet is not None else None
        if unet is not None and getattr(unet, "_agentsd", None) is self:
            self._detach(unet)

    def parameters(self) -> list[torch.nn.Parameter]:
        """What to train: the patched layers' projections and, where the recipe has one, their module."""
        return list(weights_of(self._named_layers()).values())

    def save(self, folder: str | Path) -> None:
        """Write the recipe and the patched layers' weights, for `apply_agentsd(pipe, recipe=folder)`."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.recipe.save(folder)
        save_weights(self._named_layers(), folder)

    def __enter__(self) -> AgentHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        unet = self._unet() if self._unet is not None else None
        if unet is None or getattr(unet, "_agentsd", None) is not self:
            return
        self._detach(unet)
        if self._outer is not None:  # a block inside another
            self._outer._attach(unet)

    def __repr__(self) -> str:
        return f"AgentHandle({self.recipe}, {len(self.layer_names)} layers)"

    def __getstate__(self) -> dict[str, Any]:
        gone = dict.fromkeys(("_pipe", "_call", "_awaited", "_scheduler", "_step", "_outer"))
        unet = self._unet() if self._unet is not None else None
        return self.__dict__ | gone | {"_caller": {}, "_kept": [], "_unet": unet}

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
            self._claim(attn, layer)
            if core is not None:
                attn.add_module(CORE, core)
            self._hooks.append(site.block.norm1.register_forward_pre_hook(layer.see))
            if any(getattr(operator, "feed_forward", False) for operator in self.recipe.operators):
                self._hooks.append(site.block.norm3.register_forward_hook(layer.merge_feed_forward))
                self._hooks.append(site.block.ff.register_forward_hook(layer.unmerge_feed_forward))
        if self._trained is not None:
            self._loaded = LoadedWeights(self._named_layers(), self._trained)
        self._hooks.append(unet.register_forward_pre_hook(self._begin, with_kwargs=True))
        self._hooks.append(unet.register_forward_hook(self._end, always_call=True))

    def _detach(self, unet: Any) -> None:
        """Undo an attachment, also one that broke off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._loaded is not None:
            self._loaded.restore(self._named_layers())
            self._loaded = None
        for site, layer in zip(self._sites, self._layers, strict=True):
            attn: Any = site.attn
            if not hasattr(attn, "_agentsd"):
                continue
            if hasattr(attn, CORE):
                delattr(attn, CORE)
            if is_ours(attn.processor):
                attn.set_processor(attn.processor.wrapped)
            del attn._agentsd
            layer.work.plan = None
        # fuse_qkv_projections keeps the processors it found, to put them back
        kept = getattr(unet, "original_attn_processors", None)
        if kept:
            unet.original_attn_processors = {name: _unwrapped(p) for name, p in kept.items()}
        if hasattr(unet, "_agentsd"):
            del unet._agentsd

    # Hooks on a U-Net run outside of a compiled graph, so here a tensor's value may be read.

    @torch.compiler.disable
    def _begin(self, unet: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Plan the U-Net call that starts."""
        self._enter(unet)
        latent, timestep = latent_and_timestep(unet, args, kwargs)
        pipe = self._pipe() if self._pipe is not None else None
        self._scheduler = getattr(pipe, "scheduler", self._scheduler)
        step = self._step = self._run.reader.read(timestep, self._scheduler)
        self._tell(step)
        for rule in self._rules:
            args, kwargs = rule.before(step, args, kwargs)
        if self._rules:
            latent, _ = latent_and_timestep(unet, args, kwargs)
        stages = self._run.stages(step, latent)
        for group in self._groups:
            group.begin(latent, step.timestep, stages)
        for site, layer in zip(self._sites, self._layers, strict=True):
            layer.held = self._claim(site.attn, layer)
        if any(group.site.block._compiled_call_impl is not None for group in self._groups):
            # Blocks that are compiled one by one run the same code, and each kind of block is a recompilation
            # of it: of a group the one that ranks and the others, in either phase.
            limit = torch._dynamo.config.recompile_limit + 4 * len(self._groups)
            self._call = ExitStack()
            self._call.enter_context(torch._dynamo.config.patch(recompile_limit=limit))
        return (args, kwargs) if self._rules else None

    def _enter(self, unet: Module) -> None:
        """Refuse a call that can't be served beside another; else take note of it."""
        me = threading.get_ident()
        other = self._caller.setdefault("thread", me)
        if other != me and any(thread.ident == other for thread in threading.enumerate()):
            raise RuntimeError(
                "agentsd: this U-Net is in a call of another thread; let threads take turns (a lock around "
                "the pipeline's call), or give each a U-Net of its own (copy.deepcopy)"
            )
        self._caller["thread"] = me
        if self._call is not None:  # the last call died before its end
            self._call.close()
            self._call = None
        if self._unet is None or self._unet() is not unet:
            self._unet = weakref.ref(unet)  # the model was deep-copied or unpickled, and this handle with it
        graph = self._awaited() if self._awaited is not None else None
        awaits = graph is not None and not graph.computed
        self._recomputes = checkpoints(unet)
        self._kept = [group.work.plan for group in self._groups] if awaits else []
        if awaits and torch.is_grad_enabled():
            raise RuntimeError(
                "agentsd: a second forward before the backward of the first, under gradient checkpointing "
                "which would compute the first again with the second's tokens; call backward() after each "
                "forward (gradients add up), or unet.disable_gradient_checkpointing()"
            )

    def _tell(self, step: Step) -> None:
        phases = self.recipe.timing
        if not isinstance(phases, Phases) or not 0 < phases.early_frac < 1:
            return
        if step.opens_without_early:
            self._say_once(
                "agentsd: this run has no early step (img2img of low strength has none), so what runs early "
                f"never runs in it; raise early_frac={phases.early_frac:g} (1.0: every step)"
            )
        if step.off_list:
            self._say_once(
                f"agentsd: timestep {step.timestep:g} is not one of the scheduler's, so early steps are "
                "guessed; pass an element of scheduler.timesteps to the U-Net, or apply agentsd to the "
                "pipeline"
            )

    @torch.compiler.disable
    def _end(self, unet: Module, args: tuple[Any, ...], output: Any) -> Any:
        """Let go of everything that belongs to the call that ends."""
        if self._caller.get("thread") != threading.get_ident():
            return None  # refused
        if self._call is not None:
            self._call.close()
            self._call = None
        for layer in self._layers:
            if layer.block_input is not None and output is not None:
                self._say_once(
                    f"agentsd: {layer.name} was computed without its attention processor (T-GATE does so); "
                    "it was left untouched"
                )
            if layer.mismatch:
                self._say_once(
                    f"agentsd: {layer.name} got {layer.mismatch} tokens where the latent's size gives "
                    f"{layer.work.tokens}; it was left untouched"
                )
            layer.block_input, layer.mismatch = None, 0
        self._keep_or_forget(output)
        self._caller.clear()
        if not self._rules or output is None or self._step is None:
            return None
        for rule in reversed(self._rules):
            output = rule.after(self._step, output)
        return output

    def _keep_or_forget(self, output: Any) -> None:
        """Keep the plans where checkpointing may compute the layers again after the call."""
        first = output[0] if isinstance(output, tuple) else getattr(output, "sample", None)
        if isinstance(first, Tensor) and first.requires_grad:
            if self._recomputes:
                graph = _Graph()
                first.register_hook(graph.begin)
                self._awaited = weakref.ref(graph)
            return
        for i, group in enumerate(self._groups):
            group.work.plan = self._kept[i] if self._kept else None

    def _claim(self, attn: Any, layer: LayerState) -> bool:
        """Hold the layer, also where the host has since put a plain processor there."""
        if not is_ours(attn.processor):
            if not is_plain(attn.processor):
                kind = type(attn.processor).__name__
                self._say_once(f"agentsd: {layer.name} now has a {kind}; it is left untouched")
                return False
            attn.set_processor(AgentAttnProcessor(attn.processor))
        return True

    def _say_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            warnings.warn(message, stacklevel=3)


def _sites_of(unet: Any, recipe: Recipe) -> list[Site]:
    """The layers that a recipe speaks of; raises ValueError for one that the model lacks."""
    if recipe.layers is None:
        if recipe.attention is None:
            return []
        return find_sites(unet, recipe.levels or 2, at_most=recipe.levels is None)
    every = find_sites(unet, EVERY_LEVEL, at_most=True)
    if missing := sorted(set(recipe.layers) - {site.name for site in every}):
        raise ValueError(f"layers={missing}: {type(unet).__name__} has no such self-attention layer")
    return [site for site in every if site.name in recipe.layers]


def _unwrapped(processor: Any) -> Any:
    return processor.wrapped if is_ours(processor) else processor


def _check_free(site: Site) -> None:
    if is_tomesd_block(site.block):
        raise ValueError(f"{site.name} is patched by tomesd: call tomesd.remove_patch(pipe) first")
    processor = _unwrapped(site.attn.processor)
    if not is_plain(processor):
        raise ValueError(
            f"{site.name} has a {type(processor).__name__}, which agent attention would replace: "
            "set it to AttnProcessor2_0 first (unet.set_attn_processor), or leave this pipeline unpatched"
        )
