"""What others put on, around or into a U-Net.

A layer is skipped, and a call is made again to correct cached ones, only where nobody else could see it. A
hook, a forward or a class of another package may count calls, keep states, or change them within a run: no
look from outside tells. So where there is one, nothing is skipped, and it is named. `agentsd_may_skip = True`
on a hook, function or class says that it may miss calls and see some twice.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch.nn import Module
from torch.nn.modules import module as torch_module

from .attention.processor import AgentAttnProcessor
from .hosts import PLAIN_PROCESSORS

_MAY_SKIP = "agentsd_may_skip"
_KNOWN = frozenset(
    {
        "accelerate",
        "agentsd",
        "bitsandbytes",
        "diffusers",
        "optimum",
        "peft",
        "torch",
        "torchao",
        "transformers",
    }
)
"""Packages whose layers compute what they are given and keep nothing, but for the exceptions below."""
_STATELESS_HOOK = re.compile("Offload|Casting|Autocast|ContextParallel|ExecutionTracker")
"""diffusers' hooks that move, cast or count alone."""
_STATELESS_PROCESSOR = re.compile("^(XFormers|Sliced)?AttnAddedKVProcessor|^CustomDiffusion|^IPAdapter")


def foreign_inside(unet: Module) -> str:
    """What may have to see each call of the U-Net's layers, or changes what they compute, in words."""
    for hook in _hooks(torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks):
        return f"all modules have a hook {_name(hook)}"
    for name, module in unet.named_modules():
        where, kind = name or type(unet).__name__, type(module)
        processor = vars(module).get("processor", module._modules.get("processor"))
        if processor is not None and not _keeps_nothing(processor):
            return f"{where} has a {type(processor).__name__}"
        if not _is_known_class(kind):
            return f"{where} is a {kind.__module__}.{kind.__name__}"
        if other := _replaced_forward(module):
            return f"{where} has a forward of another package ({other})"
        for hook in _hooks_of_hosts(module):
            if not _is_stateless(hook):
                return f"{where} has a {type(hook).__module__}.{type(hook).__name__}"
        if module is not unet:
            for hook in _hooks(module._forward_hooks, module._forward_pre_hooks):
                return f"{where} has a hook {_name(hook)}"
    return ""


def foreign_outside(unet: Module) -> str:
    """What sees each call of the whole U-Net, in words: it would see the calls that correct others, too."""
    for hook in _hooks(unet._forward_hooks, unet._forward_pre_hooks):
        return f"{type(unet).__name__} has a hook {_name(hook)}"
    return ""


def _keeps_nothing(processor: Any) -> bool:
    """Whether a processor computes its layer from its arguments alone, so that a call may be left out."""
    if isinstance(processor, AgentAttnProcessor):  # while a backward is awaited
        return _keeps_nothing(processor.fallback)
    kind = type(processor)
    known = kind.__name__ in PLAIN_PROCESSORS or _STATELESS_PROCESSOR.search(kind.__name__)
    return bool(known or getattr(kind, _MAY_SKIP, False)) and _is_known_class(kind)


def _is_known_class(kind: Any) -> bool:
    """Whether what a class computes is of packages that are known, or may be skipped."""
    return getattr(kind, _MAY_SKIP, False) or all(
        map(is_known, (kind.__call__, getattr(kind, "forward", None)))
    )


def _replaced_forward(module: Module) -> str:
    """Of which package the forward is that stands in place of a module's own; empty where it is known."""
    forward = vars(module).get("forward")
    if forward is None:
        return ""
    # accelerate and diffusers put one in front of what was there before
    references = getattr(getattr(module, "_diffusers_hook", None), "_fn_refs", ())
    before = [reference.original_forward or reference.forward for reference in references]
    chain = [forward, vars(module).get("_old_forward"), *before]
    foreign = [one for one in chain if one is not None and not is_known(one)]
    return _package(foreign[0]) if foreign else ""


def _hooks_of_hosts(module: Module) -> list[Any]:
    """accelerate's and diffusers' hooks around a module's forward."""
    own = vars(module).get("_hf_hook")
    hooks = [own] if own is not None else []
    hooks += getattr(vars(module).get("_diffusers_hook"), "hooks", {}).values()
    return [one for hook in hooks for one in getattr(hook, "hooks", [hook])]


def _is_stateless(hook: Any) -> bool:
    """Whether such a hook moves, casts or counts alone: it is known, and none of its methods is another's."""
    kind = type(hook)
    if getattr(kind, _MAY_SKIP, False) or getattr(hook, _MAY_SKIP, False):
        return True
    own = [base.__module__.partition(".")[0] in _KNOWN for base in kind.__mro__ if base is not object]
    replaced = [value for value in vars(hook).values() if inspect.isroutine(value)]
    named = kind.__module__.startswith("accelerate.") or _STATELESS_HOOK.search(kind.__name__)
    return bool(named) and all(own) and all(map(is_known, replaced))


def _hooks(*registered: dict[Any, Any]) -> Iterator[Any]:
    """The hooks of other packages."""
    for hooks in registered:
        yield from (hook for hook in hooks.values() if not is_known(hook))


def is_known(function: Any) -> bool:
    """Whether a function and all that it wraps are of packages that are known, or may be skipped."""
    while function is not None:
        if getattr(function, _MAY_SKIP, False):
            return True
        if _package(function) not in _KNOWN:
            return False
        function = _wrapped(function)
    return True


def _wrapped(function: Any) -> Any:
    if isinstance(function, partial):
        return function.func
    return getattr(function, "_torchdynamo_orig_callable", None) or getattr(function, "__wrapped__", None)


def _package(function: Any) -> str:
    """The package that a function's code is of; what `functools.wraps` copies says nothing of it."""
    if isinstance(function, partial):
        return "torch"  # what it calls is looked at
    function = getattr(function, "__func__", function)
    names = getattr(function, "__globals__", None)
    where = type(function).__module__ if names is None else names.get("__name__") or ""
    return str(where).partition(".")[0]


def _name(hook: Any) -> str:
    while isinstance(hook, partial):
        hook = hook.func
    return f"{_package(hook)}.{getattr(hook, '__qualname__', type(hook).__name__)}"
