"""Apply agent attention to a live pipeline, and take it away again."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.nn import Module

from .adapter import FILE_NAME as WEIGHTS
from .adapter import attach_core, detach_core, load_weights, restore_weights, save_weights, weights_of
from .config import AgentConfig
from .hosts import EVERY_LEVEL, Site, find_model, find_sites, is_plain, is_tomesd_block, latent_and_timestep
from .layers import LayerConfigs, load_config
from .mediators import LatentDistance
from .plan import Group
from .processor import AgentAttnProcessor, LayerState
from .schedule import StepReader


def apply_agentsd(
    pipe: Any,
    ratio: float = AgentConfig.ratio,
    k: float = AgentConfig.k,
    scale: float = AgentConfig.scale,
    early_frac: float = AgentConfig.early_frac,
    *,
    mode: str = AgentConfig.mode,
    attention: str = AgentConfig.attention,
    parts: Sequence[str] = AgentConfig.parts,
    agents: str = AgentConfig.agents,
    agent_counts: Sequence[int] = AgentConfig.agent_counts,
    schedule: str = AgentConfig.schedule,
    thresholds: Sequence[float] = AgentConfig.thresholds,
    schedule_per: str = AgentConfig.schedule_per,
    early: str = AgentConfig.early,
    late: str | None = AgentConfig.late,
    late_ratio: float | None = AgentConfig.late_ratio,
    levels: int | None = AgentConfig.levels,
    agent_ratio: float = AgentConfig.agent_ratio,
    early_stride: int = AgentConfig.early_stride,
    late_stride: int = AgentConfig.late_stride,
    cells: str = AgentConfig.cells,
    seed: int = AgentConfig.seed,
    config: AgentConfig | LayerConfigs | str | Path | None = None,
) -> AgentHandle:
    """Swap the self-attention of a Stable Diffusion U-Net for agent attention (Agent Attention, Eq. 9).

    No training, no change to the weights. A pipeline that is patched already gets the new settings.

    Args:
        pipe: a diffusers pipeline with a `unet` (or a DiT or PixArt one), or the model itself.
        ratio, k, scale, early_frac and all up to seed: see `AgentConfig`.
        config: in place of all these settings, an `AgentConfig`, or a file or folder that holds one
            (`agentsd.json`, as beside a DreamBooth model; trained weights beside it, `agentsd.safetensors`,
            are loaded); or settings layer by layer (`LayerConfigs`, or the YAML file of one).

    Returns:
        A handle: `handle.remove()` undoes the patch, and so does leaving a `with apply_agentsd(pipe):` block.

    Raises:
        TypeError: `pipe` has no U-Net, or a setting has a wrong type.
        ValueError: a setting is out of range or stands beside `config`, the model has no layer to patch, or
            something else holds its self-attention (tomesd, a processor of another kind). The pipeline is
            left as it was.
    """
    settings = AgentConfig(
        ratio=ratio,
        k=k,
        scale=scale,
        early_frac=early_frac,
        mode=mode,
        attention=attention,
        parts=tuple(parts),
        agents=agents,
        agent_counts=tuple(agent_counts),
        schedule=schedule,
        thresholds=tuple(thresholds),
        schedule_per=schedule_per,
        early=early,
        late=late,
        late_ratio=late_ratio,
        levels=levels,
        agent_ratio=agent_ratio,
        early_stride=early_stride,
        late_stride=late_stride,
        cells=cells,
        seed=seed,
    )
    if config is None:
        config = settings
    elif settings != AgentConfig():
        raise ValueError(f"config={config!r} holds all settings: pass it alone, or leave it out")
    trained = None
    if isinstance(config, str | Path):
        trained = Path(config) if (Path(config) / WEIGHTS).exists() else None
        config = load_config(config)
    unet = find_model(pipe)
    sites = _sites_of(unet, config)
    for site in sites:
        _check_free(site)
    remove_agentsd(unet)
    handle = AgentHandle(config, pipe if pipe is not unet else None, sites)
    handle._attach(unet, sites)
    if trained is not None:
        try:
            handle._load(trained)
        except ValueError:
            handle.remove()
            raise
    return handle


def remove_agentsd(pipe: Any) -> None:
    """Leave a pipeline (or U-Net) as if agentsd had never been there; does nothing if it is not patched."""
    unet = find_model(pipe)
    handle = getattr(unet, "_agentsd", None)
    if handle is not None:
        handle._detach(unet)


def _sites_of(unet: Any, config: AgentConfig | LayerConfigs) -> list[Site]:
    """The layers that settings speak of; raises ValueError for one that the model lacks."""
    if isinstance(config, AgentConfig):
        default = 1 if config.mode == "exact" else 2
        return find_sites(unet, config.levels or default, at_most=config.levels is None)
    every = find_sites(unet, EVERY_LEVEL, at_most=True)
    if missing := sorted(set(config.layers) - {site.name for site in every}):
        raise ValueError(f"layers={missing}: {type(unet).__name__} has no such self-attention layer")
    return [site for site in every if site.name in config.layers]


class AgentHandle:
    """What `apply_agentsd` returns: the settings, the patched layers, and the way back.

    Attributes:
        config: the settings in force.
        layer_names: names of the patched self-attention layers.
    """

    def __init__(self, config: AgentConfig | LayerConfigs, pipe: Any, sites: list[Site]) -> None:
        self.config = config
        self.layer_names = [site.name for site in sites]
        self._pipe = None if pipe is None or isinstance(pipe, Module) else weakref.ref(pipe)
        self._unet: weakref.ref[Module] | None = None
        groups: dict[Any, Group] = {}
        finest = min(site.span for site in sites)
        self._layers: list[tuple[Any, LayerState]] = []
        for i, site in enumerate(sites):
            own = config if isinstance(config, AgentConfig) else config.layers[site.name]
            key = i if own.mode == "exact" else (site.span, own)
            group = groups.setdefault(key, Group(site, i, own, site.span // finest))
            self._layers.append((site.attn, LayerState(site.name, group)))
        self._groups = list(groups.values())
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._call = ExitStack()  # what is set for the U-Net call under way
        shared = config if isinstance(config, AgentConfig) else config.first
        self._steps = StepReader(shared.early_frac)
        self._distance: LatentDistance | None = None
        if shared.schedule == "distance":
            each = shared.schedule_per == "sample"
            self._distance = LatentDistance(shared.agent_counts, shared.thresholds, each)
        self._replaced: dict[str, torch.Tensor] = {}
        self._said: set[str] = set()

    def remove(self) -> None:
        """Undo this patch; nothing happens if it was undone or replaced before."""
        unet = self._unet() if self._unet is not None else None
        if unet is not None and getattr(unet, "_agentsd", None) is self:
            self._detach(unet)

    def parameters(self) -> list[torch.nn.Parameter]:
        """What to train: the patched layers' projections and, where settings ask for one, their module."""
        return list(weights_of(self._named_layers()).values())

    def save(self, folder: str | Path) -> None:
        """Write the settings and the patched layers' weights, for `apply_agentsd(pipe, config=folder)`.

        Raises:
            ValueError: the settings are layer by layer; those have a file of their own.
        """
        if not isinstance(self.config, AgentConfig):
            raise ValueError("settings by layer are saved by LayerConfigs.save(path), without weights")
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.config.save(folder)
        save_weights(self._named_layers(), folder)

    def __enter__(self) -> AgentHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"AgentHandle({self.config}, {len(self.layer_names)} layers)"

    def _named_layers(self) -> list[tuple[str, Any]]:
        return [(layer.name, attn) for attn, layer in self._layers]

    def _load(self, folder: Path) -> None:
        self._replaced = load_weights(self._named_layers(), folder)

    def _attach(self, unet: Any, sites: list[Site]) -> None:
        self._unet = weakref.ref(unet)
        unet._agentsd = self
        for site, (attn, layer) in zip(sites, self._layers, strict=True):
            attn._agentsd = layer
            self._claim(attn, layer)
            if layer.group.config.attention != "agent":
                attach_core(site, layer.group.config, unet.config.sample_size)
            self._hooks.append(site.block.norm1.register_forward_pre_hook(layer.see))
            if layer.group.config.mode == "turbo":
                self._hooks.append(site.block.norm3.register_forward_hook(layer.merge_feed_forward))
                self._hooks.append(site.block.ff.register_forward_hook(layer.unmerge_feed_forward))
        self._hooks.append(unet.register_forward_pre_hook(self._begin, with_kwargs=True))
        self._hooks.append(unet.register_forward_hook(self._end, always_call=True))

    def _detach(self, unet: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        restore_weights(self._named_layers(), self._replaced)
        for attn, layer in self._layers:
            detach_core(attn)
            self._claim(attn, layer)
            attn.set_processor(_unwrapped(attn.processor))
            del attn._agentsd
        # fuse_qkv_projections keeps the processors it found, to put them back
        kept = getattr(unet, "original_attn_processors", None)
        if kept:
            unet.original_attn_processors = {name: _unwrapped(p) for name, p in kept.items()}
        del unet._agentsd

    # Hooks on a U-Net run outside of a compiled graph, so here a tensor's value may be read.

    @torch.compiler.disable
    def _begin(self, unet: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Set each layer's phase and token grid for the U-Net call that starts."""
        if self._unet is None or self._unet() is not unet:
            self._unet = weakref.ref(unet)  # the model was deep-copied, and this handle with it
        latent, timestep = latent_and_timestep(unet, args, kwargs)
        pipe = self._pipe() if self._pipe is not None else None
        step = self._steps.read(timestep, getattr(pipe, "scheduler", None))
        agents: tuple[int, ...] | None = None
        if self._distance is not None:
            counts = self._distance.read(latent, step.opens, step.repeats)
            most = max(self._distance.counts)  # of a stage for each sample, "none" is not one
            agents = tuple(n or most for n in counts) if any(counts) else None
        elif step.early:
            agents = (0,) * latent.shape[0]
        elif step.opens_without_early:
            self._say_once(
                f"agentsd: this run has no early step (it starts at timestep {step.timestep:g}), so agent "
                f"attention never runs in it; raise early_frac={self._steps.early_frac:g} (1.0: every step)"
            )
        for group in self._groups:
            group.begin(latent, step.timestep, agents)
        for attn, layer in self._layers:
            layer.held = self._claim(attn, layer)
        self._call.close()  # the last call may have died before its end
        if any(group.site.block._compiled_call_impl is not None for group in self._groups):
            # Blocks that are compiled one by one run the same code, and each kind of block is a recompilation
            # of it: of a group the one that ranks and the others, in either phase.
            limit = torch._dynamo.config.recompile_limit + 4 * len(self._groups)
            self._call.enter_context(torch._dynamo.config.patch(recompile_limit=limit))

    @torch.compiler.disable
    def _end(self, unet: Module, args: tuple[Any, ...], output: Any) -> None:
        """Let go of everything that belongs to the call that ends."""
        self._call.close()
        for _, layer in self._layers:
            if layer.block_input is not None and output is not None:
                self._say_once(
                    f"agentsd: {layer.name} was computed without its attention processor (T-GATE does so); "
                    "it was left untouched"
                )
            if layer.mismatch:
                self._say_once(
                    f"agentsd: {layer.name} got {layer.mismatch} tokens where the latent's size gives "
                    f"{layer.group.tokens}; it was left untouched"
                )
            layer.block_input, layer.mismatch = None, 0
        if not torch.is_grad_enabled():  # gradient checkpointing recomputes the layers after the call
            for group in self._groups:
                group.end()

    def _claim(self, attn: Any, layer: LayerState) -> bool:
        """Hold the layer, also where the host has since put a plain processor there, or copied ours."""
        processor = attn.processor
        if not isinstance(processor, AgentAttnProcessor):
            if not is_plain(processor):
                self._say_once(
                    f"agentsd: {layer.name} now has a {type(processor).__name__}; it is left untouched"
                )
                return False
            processor = AgentAttnProcessor(processor)
            attn.set_processor(processor)
        elif processor.is_copy:
            processor.wrapped, processor.is_copy = layer.wrapped_type(), False
        layer.wrapped_type = type(processor.wrapped)
        return True

    def _say_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            warnings.warn(message, stacklevel=3)


def _unwrapped(processor: Any) -> Any:
    return processor.wrapped if isinstance(processor, AgentAttnProcessor) else processor


def _check_free(site: Site) -> None:
    if is_tomesd_block(site.block):
        raise ValueError(f"{site.name} is patched by tomesd: call tomesd.remove_patch(pipe) first")
    processor = _unwrapped(site.attn.processor)
    if not is_plain(processor):
        raise ValueError(
            f"{site.name} has a {type(processor).__name__}, which agent attention would replace: "
            "set it to AttnProcessor2_0 first (unet.set_attn_processor), or leave this pipeline unpatched"
        )
