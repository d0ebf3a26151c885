"""Third-party hooks, forwards and classes on or in a U-Net.

Layers are skipped, and calls repeated to correct cached ones, only if no third party could notice. A hook,
forward or class of another package may count calls, keep state, or change what it does during a run, and
nothing shows that from outside. So if there is one, nothing is skipped, and the warning names it. Set
`agentsd_may_skip = True` on a hook, function or class that may miss calls and see some twice.
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
"""Packages whose layers keep no state between calls, with the exceptions below."""
_STATELESS_HOOK = re.compile("Offload|Casting|Autocast|ContextParallel|ExecutionTracker")
"""diffusers' hooks that only move, cast or count."""
_STATELESS_PROCESSOR = re.compile("^(XFormers|Sliced)?AttnAddedKVProcessor|^CustomDiffusion|^IPAdapter")


def foreign_inside(unet: Module) -> str:
    """Return what may have to see every call of the U-Net's layers, in words; "" if there is nothing."""
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
    """Return what sees every call of the U-Net, in words. It would see the repeated calls, too."""
    for hook in _hooks(unet._forward_hooks, unet._forward_pre_hooks):
        return f"{type(unet).__name__} has a hook {_name(hook)}"
    return ""


def _keeps_nothing(processor: Any) -> bool:
    """Return whether a processor depends on its arguments alone, so that a call may be skipped."""
    if isinstance(processor, AgentAttnProcessor):  # in place until a backward is done
        return _keeps_nothing(processor.fallback)
    kind = type(processor)
    known = kind.__name__ in PLAIN_PROCESSORS or _STATELESS_PROCESSOR.search(kind.__name__)
    return bool(known or getattr(kind, _MAY_SKIP, False)) and _is_known_class(kind)


def _is_known_class(kind: Any) -> bool:
    """Return whether a class's code is of known packages, or may be skipped."""
    return getattr(kind, _MAY_SKIP, False) or all(
        map(is_known, (kind.__call__, getattr(kind, "forward", None)))
    )


def _replaced_forward(module: Module) -> str:
    """Return the package of the forward that replaces a module's own; "" if it is known."""
    forward = vars(module).get("forward")
    if forward is None:
        return ""
    # accelerate and diffusers wrap the forward that was there before
    references = getattr(getattr(module, "_diffusers_hook", None), "_fn_refs", ())
    before = [reference.original_forward or reference.forward for reference in references]
    chain = [forward, vars(module).get("_old_forward"), *before]
    foreign = [one for one in chain if one is not None and not is_known(one)]
    return _package(foreign[0]) if foreign else ""


def _hooks_of_hosts(module: Module) -> list[Any]:
    """Return the hooks of accelerate and diffusers around a module's forward."""
    own = vars(module).get("_hf_hook")
    hooks = [own] if own is not None else []
    hooks += getattr(vars(module).get("_diffusers_hook"), "hooks", {}).values()
    return [one for hook in hooks for one in getattr(hook, "hooks", [hook])]


def _is_stateless(hook: Any) -> bool:
    """Return whether such a hook is known to only move, cast or count, and no method of it was replaced."""
    kind = type(hook)
    if getattr(kind, _MAY_SKIP, False) or getattr(hook, _MAY_SKIP, False):
        return True
    own = [base.__module__.partition(".")[0] in _KNOWN for base in kind.__mro__ if base is not object]
    replaced = [value for value in vars(hook).values() if inspect.isroutine(value)]
    named = kind.__module__.startswith("accelerate.") or _STATELESS_HOOK.search(kind.__name__)
    return bool(named) and all(own) and all(map(is_known, replaced))


def _hooks(*registered: dict[Any, Any]) -> Iterator[Any]:
    """Yield the hooks of third parties."""
    for hooks in registered:
        yield from (hook for hook in hooks.values() if not is_known(hook))


def is_known(function: Any) -> bool:
    """Return whether a function and all that it wraps are of known packages, or may be skipped."""
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
    """Return the package of a function's code, whatever `functools.wraps` copied onto it."""
    if isinstance(function, partial):
        return "torch"  # the function inside is checked by itself
    function = getattr(function, "__func__", function)
    names = getattr(function, "__globals__", None)
    where = type(function).__module__ if names is None else names.get("__name__") or ""
    return str(where).partition(".")[0]


def _name(hook: Any) -> str:
    while isinstance(hook, partial):
        hook = hook.func
    return f"{_package(hook)}.{getattr(hook, '__qualname__', type(hook).__name__)}"
