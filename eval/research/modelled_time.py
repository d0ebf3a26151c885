"""Seconds of Stable Diffusion 1.5's denoising on a GPU, by a model of it: nothing here was measured on one.

A roofline (Williams et al. 2009): an operation takes the longest of its FLOPs over what the GPU computes in a
second, its bytes over what the memory moves in one, and a launch. A run takes the sum, or the host's time to
ask for all operations where that is longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from time import process_time
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ..cost.architectures import SD15
from ..environment import describe_run
from ..images.methods import Method, parse_method
from ..pages import rows as results
from ..pages.rows import Column, Row, figure
from ..settings import Settings
from .computed_memory import ARCHITECTURES
from .settings import ModelledSettings
from .shapes import FLASH, METHODS, FusedAttention, denoise, in_dtype, unet

STEPS = 25
SMALL = SD15 | {"block_out_channels": (64, 128, 256, 256), "cross_attention_dim": 128}
"""What a CPU runs in seconds, to check the model."""
SMALL_SIZE, SMALL_STEPS, ROUNDS = 384, 9, 3
NOTE = (
    f"Modelled: nothing was measured on a GPU. {{}} in float16, one image, guided, {STEPS} DPM++ 2M steps, "
    "denoising alone, from vendors' figures of dense float16 products and of bandwidth, 60% of the products "
    "reached (40% in fused attention), 2 microseconds a launch, 6 for the host to ask for an operation. GPU "
    "speed-up is the device's alone, as with a compiled U-Net or larger batches; eager is with the host's "
    "waiting. The last rows check the model on a small U-Net: this CPU's own figures, against CPU seconds "
    "that were measured."
)


@dataclass(frozen=True)
class Machine:
    """What a device does in a second.

    Attributes:
        flops: of matrix products in the run's precision, with sums in float32.
        bandwidth: bytes to or from memory.
        launch: seconds that a kernel takes at least.
        host: seconds that the host takes to ask for an operation; 0 where it is the device itself.
        reached: share of `flops` that convolutions and matrix products reach.
        attention: share of `flops` that fused attention reaches.
        head_tile: a fused attention computes a head's width in multiples of so many.
    """

    name: str
    flops: float
    bandwidth: float
    launch: float = 2e-6
    host: float = 6e-6
    reached: float = 0.6
    attention: float = 0.4
    head_tile: int = 32


# Vendors' figures: dense float16 products summed in float32, and the memory's bandwidth.
GPUS = (
    Machine("RTX 3060 12 GB", 25.6e12, 360e9),
    Machine("RTX 4090", 165e12, 1008e9),
    Machine("A100 80 GB", 312e12, 2039e9),
)


class Roofline(TorchDispatchMode):
    """Adds up the seconds of each operation on tensors of a device type.

    Attributes:
        seconds: of the device, for each machine.
        launches: operations that compute something.
    """

    def __init__(self, machines: Sequence[Machine], device: str = "meta") -> None:
        super().__init__()
        self.machines, self.device = machines, device
        self.seconds = [0.0] * len(machines)
        self.launches = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        touched = [
            t
            for t in tree_leaves((args, kwargs, out))
            if isinstance(t, Tensor) and t.device.type == self.device
        ]
        if not touched or func.is_view or func.overloadpacket in _FREE:
            return out
        moved = sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in touched)
        self.launches += 1
        for i, machine in enumerate(self.machines):
            flops = _flops(func, args, kwargs or {}, out, machine)
            share = machine.attention if func.overloadpacket is FLASH else machine.reached
            self.seconds[i] += max(machine.launch, flops / (machine.flops * share), moved / machine.bandwidth)
        return out

    def eager(self, machine: int) -> float:
        """Seconds with the host's waiting among them."""
        return max(self.seconds[machine], self.launches * self.machines[machine].host)


_FREE = {torch.ops.aten.empty, torch.ops.aten.detach, torch.ops.aten._unsafe_view}


def _flops(func: Any, args: Any, kwargs: Any, out: Any, machine: Machine) -> float:
    if func.overloadpacket is FLASH:
        (batch, heads, queries, width), keys = args[0].shape, args[1].shape[2]
        padded = -(-width // machine.head_tile) * machine.head_tile
        return 4 * batch * heads * queries * keys * padded
    count = flop_registry.get(func.overloadpacket)
    return count(*args, **kwargs, out_val=out) if count else 0


def command(settings: ModelledSettings, console: Console) -> None:
    """Model each row, print it and write all."""
    run = describe_run(settings, torch.device("cpu"))
    name, config, _ = ARCHITECTURES[settings.arch]
    note = NOTE.format(name)
    rows = []
    for row in chain(_rows(config, settings.sizes), checked()):
        rows.append(row)
        console.print(row["label"])
    gpus = [
        Column(f"{gpu.name}: {title}", figure(f"{name} {gpu.name}", form))
        for gpu in GPUS
        for title, name, form in (
            ("s", "seconds", ".2f"),
            ("GPU speed-up", "speedup", ".2f"),
            ("eager", "eager", ".2f"),
        )
    ]
    columns = [Column("run", lambda row: row["label"]), Column("launches", figure("launches", ",d")), *gpus]
    cpu = [
        Column("check on a CPU", lambda row: row["label"]),
        Column("modelled s", figure("modelled", ".2f")),
        Column("measured s", figure("measured", ".2f")),
        Column("speed-up modelled", figure("modelled_speedup", ".2f")),
        Column("measured", figure("measured_speedup", ".2f")),
    ]
    results.write_rows(settings.out, "time", rows, [columns, cpu], run, note)
    for some in (columns, cpu):
        console.print(results.to_terminal("time", rows, some))
    console.print(note)
    console.print(f"figures: {settings.out}", soft_wrap=True)


def _rows(config: Mapping[str, Any], sizes: Sequence[int]) -> Iterator[Row]:
    model = in_dtype(lambda: unet(config), torch.float16, "meta")
    for size in sizes:
        base: dict[str, Roofline] = {}
        for name, backend in METHODS:
            method = parse_method(name, 0.4, Settings(), backend)
            account = modelled(method, model, size, STEPS, GPUS)
            first = base.setdefault(backend, account)
            row: Row = {
                "label": f"{size} px, {method.label}" + (", unfused" if backend == "unfused" else ""),
                "launches": account.launches,
            }
            for i, gpu in enumerate(GPUS):
                row[f"seconds {gpu.name}"] = account.eager(i)
                row[f"speedup {gpu.name}"] = first.seconds[i] / account.seconds[i]
                row[f"eager {gpu.name}"] = first.eager(i) / account.eager(i)
            yield row


def modelled(method: Method, model: Any, size: int, steps: int, machines: Sequence[Machine]) -> Roofline:
    """Return the account of a guided run of one image, `model` being on torch's meta device."""
    account = Roofline(machines)
    with FusedAttention() if method.backend == "sdpa" else nullcontext(), account:
        denoise(method, model, size, 1, steps)
    return account


def checked() -> Iterator[Row]:
    """A row for each method on a small U-Net: modelled with this CPU's figures, and measured in turns."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        cpu = (this_cpu(),)
        shape = in_dtype(lambda: unet(SMALL), torch.float32, "meta")
        small = unet(SMALL)
        methods = [
            method
            for name, backend in METHODS
            if (method := parse_method(name, 0.4, Settings(), backend)).steps is None and backend == "sdpa"
        ]
        times: list[list[float]] = [[] for _ in methods]
        for _ in range(ROUNDS):
            for own, method in zip(times, methods, strict=True):
                start = process_time()
                denoise(method, small, SMALL_SIZE, 1, SMALL_STEPS)
                own.append(process_time() - start)
        seconds = [modelled(method, shape, SMALL_SIZE, SMALL_STEPS, cpu).seconds[0] for method in methods]
        for method, ours, own in zip(methods, seconds, times, strict=True):
            yield {
                "label": f"CPU, {method.label}",
                "modelled": ours,
                "measured": sorted(own)[ROUNDS // 2],
                "modelled_speedup": seconds[0] / ours,
                "measured_speedup": sorted(times[0])[ROUNDS // 2] / sorted(own)[ROUNDS // 2],
            }
    finally:
        torch.set_num_threads(threads)


def this_cpu() -> Machine:
    """Return what one core of this machine does, measured: products, copies, and small operations."""
    rng = torch.Generator("cpu").manual_seed(0)
    rand = partial(torch.rand, generator=rng, device="cpu")
    a, b = rand(1024, 1024), rand(1024, 1024)
    large, small = rand(1 << 25), rand(16)
    query = rand(2, 8, 2304, 8)  # as the small U-Net's
    flops = 2 * 1024**3 / _seconds(lambda: a @ b, 5)
    attend = _seconds(lambda: scaled_dot_product_attention(query, query, query), 3)
    return Machine(
        "this CPU",
        flops=flops,
        attention=4 * query.numel() * query.shape[2] / attend / flops,
        bandwidth=2 * large.nbytes / _seconds(large.clone, 5),
        launch=_seconds(lambda: small + small, 1000),
        host=0.0,
        reached=1.0,
        head_tile=1,
    )


def _seconds(call: Callable[[], object], times: int) -> float:
    """The least CPU seconds of a call in three rounds of so many."""
    rounds = []
    for _ in range(3):
        start = process_time()
        for _ in range(times):
            call()
        rounds.append((process_time() - start) / times)
    return min(rounds)
