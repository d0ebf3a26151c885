"""The methods a row can name: each is applied to a pipeline for the length of a `with` block."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tomesd
import torch
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0

from agentsd import Recipe, apply_agentsd, remove_agentsd
from agentsd.hosts import EVERY_LEVEL, find_sites

from ..errors import EvalError
from ..settings import Backend, Settings, recipe_of

Reseed = Callable[[int], None]
_MODES = {"agentsd": "exact", "agentsd-fast": "fast", "agentsd-turbo": "turbo"}
_DEFAULTS = {"k": 0.075, "scale": -0.15, "early_frac": 0.4, "seed": 0}


@dataclass(frozen=True)
class Method:
    """One or more accelerators at one setting, such as ("agentsd", "deepcache") at ratio 0.4."""

    parts: tuple[str, ...]
    ratio: float | None = None
    backend: Backend = "sdpa"
    agent: tuple[tuple[str, Any], ...] = ()
    cache_interval: int = 3
    recipe: Recipe | None = None
    """What a part runs that has a name of the user's own."""
    folder: Path | None = None
    """Or where it is read from, with trained attention or without."""

    @property
    def name(self) -> str:
        """The parts joined by "+", or "stock"."""
        return "+".join(self.parts) or "stock"

    @property
    def key(self) -> str:
        """A folder name that differs wherever the pictures may differ; a setting's default goes unsaid."""
        words = [self.name]
        if self.ratio is not None:
            words.append(f"r{self.ratio:g}")
        words += [f"{key}{value}" for key, value in self.agent if value != _DEFAULTS.get(key)]
        if self.recipe is not None:
            words.append(_hash(repr(self.recipe.to_mapping()).encode()))
        if self.folder is not None:
            words.append(_content(self.folder))
        if "deepcache" in self.parts:
            words.append(f"n{self.cache_interval}")
        words.append(self.backend)
        return "-".join(words)

    @property
    def label(self) -> str:
        """The name and ratio for people, such as "agentsd r=0.4"."""
        return self.name if self.ratio is None else f"{self.name} r={self.ratio:g}"

    @contextmanager
    def applied(self, pipe: Any) -> Iterator[Reseed]:
        """Patch `pipe` (a pipeline or, without deepcache, a U-Net) and put everything back on leaving.

        Yields a function that fixes the method's own random choices (tomesd draws its cells from a
        generator of its own); call it before each batch.
        """
        reseeds = []
        with ExitStack() as stack:
            stack.enter_context(_attention_backend(pipe, self.backend))
            for part in self.parts:
                reseeds.append(stack.enter_context(_PARTS.get(part, _named)(self, pipe)))

            def reseed_all(seed: int) -> None:
                for reseed in reseeds:
                    reseed(seed)

            yield reseed_all


def parse_method(
    text: str, ratio: float | None, settings: Settings, backend: Backend | None = None
) -> Method:
    """Return the method named by `text`, such as "agentsd+deepcache"; "stock" has no parts.

    A method that merges nothing drops the ratio. Raises EvalError on an unknown name.
    """
    parts = () if text == "stock" else tuple(text.split("+"))
    if unknown := [part for part in parts if part not in {*_PARTS, *settings.named}]:
        raise EvalError(
            f"unknown method {unknown[0]!r} in {text!r}; use stock, "
            f"{', '.join([*_PARTS, *settings.named])} or a composition such as agentsd+deepcache"
        )
    attending = [part for part in parts if part != "deepcache"]
    if len(set(parts)) < len(parts) or len(attending) > 1:
        raise EvalError(
            f"{text!r} can't be combined: name a part once, and one of tomesd and agentsd at most"
        )
    if not set(attending) & {"tomesd", *_MODES}:
        ratio = None
    agent = settings.agent if set(parts) & set(_MODES) else {}
    recipe, folder = None, None
    for own in (settings.named[part] for part in parts if part not in _PARTS):
        recipe, folder = (recipe_of(own), None) if isinstance(own, dict) else (None, own)
    return Method(
        parts,
        ratio,
        backend or settings.backend,
        tuple(sorted(agent.items())),
        settings.cache_interval,
        recipe,
        folder,
    )


def expand(names: Sequence[str], ratios: Sequence[float], settings: Settings) -> list[Method]:
    """Return every method at every ratio, "stock" first, without repeats."""
    methods = [parse_method("stock", None, settings)]
    for name in names:
        for ratio in ratios:
            method = parse_method(name, ratio, settings)
            if method not in methods:
                methods.append(method)
    return methods


def unet_of(pipe: Any) -> Any:
    """Return the U-Net of a pipeline, or the U-Net itself."""
    return getattr(pipe, "unet", pipe)


def finest_attention_downsample(unet: Any) -> int:
    """Return how much the first level with attention is downsampled: 1 in SD 1.x, 2 in SDXL."""
    for level, block in enumerate(unet.down_blocks):
        if getattr(block, "attentions", None):
            return 2**level
    raise EvalError(
        f"{type(unet).__name__} has no attention in its down blocks, so there is nothing to merge"
    )


def _nothing(seed: int) -> None:
    """Fix no random choice: the method has none of its own."""


@contextmanager
def _attention_backend(pipe: Any, backend: Backend) -> Iterator[None]:
    """Set the standard attention layers of the U-Net; layers with other processors are left alone."""
    unet = unet_of(pipe)
    wanted = {"sdpa": AttnProcessor2_0, "unfused": AttnProcessor}[backend]
    before = dict(unet.attn_processors)
    standard = (AttnProcessor, AttnProcessor2_0)
    unet.set_attn_processor({n: wanted() if type(p) in standard else p for n, p in before.items()})
    try:
        yield
    finally:
        unet.set_attn_processor(before)


@contextmanager
def _tomesd(method: Method, pipe: Any) -> Iterator[Reseed]:
    unet = unet_of(pipe)
    # tomesd counts levels from the latent; its default of 1 would patch nothing in SDXL.
    tomesd.apply_patch(pipe, ratio=method.ratio, max_downsample=finest_attention_downsample(unet))

    def reseed(seed: int) -> None:
        device = next(unet.parameters()).device
        unet._tome_info["args"]["generator"] = torch.Generator(device).manual_seed(seed)

    try:
        yield reseed
    finally:
        tomesd.remove_patch(pipe)
        for module in unet.modules():
            module.__dict__.pop("_tome_info", None)


@contextmanager
def _agentsd(method: Method, pipe: Any, mode: str) -> Iterator[Reseed]:
    assert method.ratio is not None
    try:
        apply_agentsd(pipe, ratio=method.ratio, mode=mode, **dict(method.agent))
    except (TypeError, ValueError) as error:
        raise EvalError(f"{method.label}: {error}") from error
    try:
        yield _nothing
    finally:
        remove_agentsd(pipe)


@contextmanager
def _named(method: Method, pipe: Any) -> Iterator[Reseed]:
    try:
        apply_agentsd(pipe, recipe=method.recipe or method.folder)  # type: ignore[arg-type]
    except (TypeError, ValueError, OSError) as error:
        raise EvalError(f"{method.label}: {error}") from error
    try:
        yield _nothing
    finally:
        remove_agentsd(pipe)


def _content(path: Path) -> str:
    """A short hash of a file, or of the settings and weights in a folder."""
    files = [path] if path.is_file() else sorted(path.glob("agentsd.*"))
    return _hash(b"".join(file.read_bytes() for file in files))


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:8]


@contextmanager
def _deepcache(method: Method, pipe: Any) -> Iterator[Reseed]:
    from DeepCache import DeepCacheSDHelper

    helper = DeepCacheSDHelper(pipe=pipe)
    helper.set_params(cache_interval=method.cache_interval, cache_branch_id=0)
    # Its disable() leaves a `forward` on every module it wrapped.
    before = {module: module.__dict__.get("forward") for module in pipe.unet.modules()}
    helper.enable()
    try:
        yield _nothing
    finally:
        helper.disable()
        for module, forward in before.items():
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = forward


class _NoCore:
    """A self-attention processor whose values pass straight through; every projection is still computed."""

    def __call__(self, attn: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        attn.to_q(hidden_states)
        attn.to_k(hidden_states)
        return attn.to_out[0](attn.to_v(hidden_states))


@contextmanager
def _limit(method: Method, pipe: Any, levels: int) -> Iterator[Reseed]:
    """No attention between the tokens of the finest levels: what no method on them can be faster than.

    Its pictures mean nothing.
    """
    layers: list[Any] = [site.attn for site in find_sites(unet_of(pipe), levels, at_most=True)]
    before = [layer.processor for layer in layers]
    for layer in layers:
        layer.set_processor(_NoCore())
    try:
        yield _nothing
    finally:
        for layer, processor in zip(layers, before, strict=True):
            layer.set_processor(processor)


_PARTS: dict[str, Callable[[Method, Any], AbstractContextManager[Reseed]]] = {
    "tomesd": _tomesd,
    **{name: partial(_agentsd, mode=mode) for name, mode in _MODES.items()},
    "deepcache": _deepcache,
    "limit": partial(_limit, levels=1),
    "limit-all": partial(_limit, levels=EVERY_LEVEL),
}


def check_scheduler(method: Method, scheduler: Any, steps: int) -> None:
    """Raise EvalError where DeepCache would refresh its cache at the wrong calls.

    DeepCache 0.1.1 finds its step by the first equal timestep. PLMS repeats one timestep, which is
    harmless where both calls reuse the cache (an interval of 3 or more); Heun repeats them all.
    """
    if "deepcache" not in method.parts:
        return
    scheduler.set_timesteps(steps)
    timesteps = scheduler.timesteps.tolist()
    for call, timestep in enumerate(timesteps):
        if (timesteps.index(timestep) % method.cache_interval == 0) != (call % method.cache_interval == 0):
            raise EvalError(
                f"DeepCache mistakes call {call} of {type(scheduler).__name__} for an earlier one (timestep "
                f"{timestep} repeats) at cache_interval {method.cache_interval}; use --scheduler ddim"
            )
