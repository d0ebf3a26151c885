"""What a GPU is asked in a few minutes: speed, memory, correctness, in the order of their worth.

Rows are written as they come. A stage that fails is noted and costs no other; one that would not fit in what
is left of the limit is shortened, then left out, and says so. Weights are random, and no network is needed.
"""

from __future__ import annotations

import collections
import json
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from ..cost import latency
from ..cost.memory import pipeline_memory
from ..environment import describe_environment, device_name
from ..errors import EvalError
from ..images.methods import Method, parse_method
from ..images.models import scheduler_like
from ..images.sampling import Stopwatch
from ..settings import LatencySettings
from .settings import GpuSettings
from .tiny import make_tiny

ROOT = Path(__file__).resolve().parents[2]
FEW = ("baseline@17/unipckarras", "baseline@12/unipckarras", "fast", "agentsd")
RUNS = (*FEW, "tomesd", "deepcache-2")
GRAPHS = ("fast", *FEW[:2])
KERNELS_OF_ATTENTION = ("flash", "fmha", "attention", "cudnn_generated", "mha")


def command(settings: GpuSettings, console: Console) -> None:
    """Run all stages, and write after each what is known."""
    device = torch.device(settings.device or "cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise EvalError("no CUDA device is here; --tiny --device cpu tries all stages on the CPU")
    settings.out.mkdir(parents=True, exist_ok=True)
    if (begun := settings.out / "gpu.jsonl").exists():
        there = json.loads(begun.read_text(encoding="utf-8").partition("\n")[0]).get("device")
        if there != (now := device_name(device)):
            raise EvalError(f"{begun}: its rows are of {there}, this is {now}; choose another --out")
    if settings.tiny:
        make_tiny()
    Campaign(settings, device, console).run()


class Campaign:
    """One process on the GPU, and a few beside it at first that need no quiet.

    Args:
        settings: of the command.
        device: that is asked.
        console: where rows are printed.
    """

    def __init__(self, settings: GpuSettings, device: torch.device, console: Console) -> None:
        self.settings, self.device, self.console = settings, device, console
        self.started = time.monotonic()
        self.on_gpu = device.type == "cuda"
        self.small, self.large = (64, 128) if settings.tiny else (512, 1024)
        self.pipes: dict[str, Any] = {}
        self.begun = settings.start is None

    def run(self) -> None:
        """All stages, until the time is up."""
        self.note("environment", **describe_environment(self.device))
        beside = self.start_beside()
        self.stage("build", 0, lambda name: self.pipe_of("sd15"))
        self.gather(beside)
        runs = {"arch": "sd15", "scopes": ["pipeline"], "methods": RUNS, "count": False}
        calls = ("tomesd", "agentsd", "todo", "no-attention-all")
        modes = ("baseline", "tomesd", "agentsd", "fast")
        # What no GPU has been asked yet comes first.
        compiled = runs | {"methods": GRAPHS, "compile": True, "repeats": 2}
        with torch._inductor.config.patch({"triton.cudagraphs": True}):  # as mode="reduce-overhead" does
            self.stage("CUDA graphs", 60, self.measured, sizes=[self.small], **compiled)
        sdxl = runs | {"arch": "sdxl", "methods": FEW}
        self.stage("SDXL, runs", 40, self.measured, sizes=[self.large], repeats=2, **sdxl)
        self.stage("SDXL, memory", 20, self.memory, "sdxl", self.large, ("baseline", "fast", "agentsd"))
        self.stage("runs, 768 px", 30, self.measured, sizes=[self.small * 3 // 2], **runs)
        self.stage("runs, batch of 8", 45, self.measured, sizes=[self.small], batches=[8], repeats=2, **runs)
        plms = {"scheduler": "plms", "steps": 9 if self.settings.tiny else 50, "repeats": 1}
        papers = runs | {"methods": ("agentsd", "fast", "tomesd")}
        self.stage("runs, PLMS", 40, self.measured, sizes=[self.small], **papers | plms)
        self.stage("table10", 25, self.table10)
        self.stage("runs, large", 40, self.measured, sizes=[self.large], **runs)
        self.stage("runs, small", 35, self.measured, sizes=[self.small], **runs)
        self.stage("memory", 15, self.memory, "sd15", self.small, modes, ("unfused", "sdpa"))
        self.stage("kernels", 15, self.kernels, ("baseline", "fast", "agentsd", "tomesd", "todo"))
        self.stage("waits", 12, self.waits, modes)
        for backend in ("sdpa", "unfused"):
            self.stage(
                "calls",
                10,
                self.measured,
                arch="sd15",
                scopes=["forward"],
                sizes=[self.small, self.large],
                batches=[1, 4] if self.on_gpu else [1],
                backend=backend,
                methods=calls,
                count=False,
            )
        self.stage("decoder", 5, self.decoder)
        if self.on_gpu:
            self.stage("ceilings", 5, self.ceilings)
        self.stage("compiled", 60, self.measured, sizes=[self.small], **compiled)
        if not self.begun:
            raise EvalError(f"start={self.settings.start!r} is the name of no stage")
        self.note("end", left=self.left())

    def left(self) -> float:
        """Seconds until the limit."""
        return self.settings.seconds - (time.monotonic() - self.started)

    def note(self, stage: str, **row: Any) -> None:
        """Write a row, and print it short."""
        row = {"stage": stage, "at": round(time.monotonic() - self.started, 1), **row}
        with (self.settings.out / "gpu.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, default=str) + "\n")
        shown = {
            name: round(x, 5) if isinstance(x, float) else x for name, x in row.items() if name != "trace"
        }
        text = " ".join(f"{name}={value}" for name, value in shown.items() if value is not None)
        self.console.print(text[:300], markup=False, highlight=False, soft_wrap=True)

    def stage(self, name: str, seconds: float, run: Callable[..., Any], *args: Any, **more: Any) -> None:
        """Run a stage if so many seconds are left; what goes wrong is noted, and the rest goes on."""
        self.begun = self.begun or name == self.settings.start
        if not self.begun:
            return
        if self.left() < seconds:
            self.note(name, left_out=f"{self.left():.0f} s left of {seconds}")
            return
        began = time.monotonic()
        try:
            run(name, *args, **more)
            self.note(name, took=time.monotonic() - began)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"[:500]
            self.note(name, failed=what, trace=traceback.format_exc()[-3000:])

    def start_beside(self) -> dict[str, subprocess.Popen[bytes]]:
        """Start what needs no quiet: DreamBooth's gpu tests, two of which failed here, and its peak."""
        words = [sys.executable, "-m"]
        tests = ["pytest", "-v", "--tb=long", "-m", "gpu", "-p", "no:cacheprovider"]
        tests += ["tests/test_dreambooth_gpu.py"]
        tests += ["-n", "5", "--dist", "worksteal"] if self.on_gpu else []
        training = ["agentsd_eval.research.training_peak", str(self.device), *["tiny"] * self.settings.tiny]
        environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": "3"}
        started = {}
        for name, own in {"tests": tests, "training": training}.items():
            with (self.settings.out / f"{name}.log").open("wb") as log:
                started[name] = subprocess.Popen(
                    words + own,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    cwd=ROOT,
                    start_new_session=True,
                )
        return started

    def gather(self, running: dict[str, subprocess.Popen[bytes]]) -> None:
        """Wait for what runs beside, end what is late, and note what it left."""
        for name, process in running.items():
            until = self.settings.beside - (time.monotonic() - self.started)
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until))
            late = process.poll() is None
            if late:  # interrupted first, so that pytest says what failed
                process.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(10)
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            lines = (self.settings.out / f"{name}.log").read_text(errors="replace").splitlines()
            for line in lines:
                if line.startswith("{"):
                    self.note(name, **json.loads(line))
            failed = [line[:160] for line in lines if line.startswith(("FAILED", "ERROR"))]
            self.note(name, exit_code="late" if late else process.returncode, failed=failed, last=lines[-1:])
        if self.on_gpu:
            torch.cuda.empty_cache()

    def pipe_of(self, arch: str) -> Any:
        """The pipeline of an architecture; one is kept at a time."""
        if arch not in self.pipes:
            self.pipes.clear()
            if self.on_gpu:
                torch.cuda.empty_cache()
            dtype = torch.float16 if self.on_gpu else torch.float32
            self.pipes[arch] = latency.build(arch, self.device, dtype)
            self.pipes[arch].set_progress_bar_config(disable=True)
        return self.pipes[arch]

    def asked(self, **changes: Any) -> LatencySettings:
        """Settings of the evaluation's own timings."""
        base: dict[str, Any] = {
            "device": str(self.device),
            "dtype": "float16" if self.on_gpu else "float32",
            "scheduler": "dpm++karras",
            "steps": 9 if self.settings.tiny else 25,
            "fewer_steps": [],
            "repeats": 1 if self.settings.tiny else 3,
        }
        return LatencySettings.model_validate(base | changes)

    def measured(self, stage: str, **changes: Any) -> None:
        """Rows of `agentsd-eval latency`, case by case, as far as the time does.

        The baseline is timed first; then fewer rounds are taken, or the first four methods alone.
        """
        asked = self.asked(**changes)
        pipe = self.pipe_of(asked.arch or "sd15")
        pipe.scheduler = scheduler_like(pipe.scheduler, asked.scheduler)
        for case in latency.cases_of(asked, pipe):
            one = self.probe(pipe, case, asked)
            short = {"repeats": 1}
            for less in ({}, short, short | {"methods": asked.methods[:4]}):
                settings = self.asked(**changes | less)
                methods = latency.methods_of(settings)
                rounds = settings.repeats + 2 + settings.count
                if 0.9 * one * len(methods) * rounds < self.left() - 3:
                    break
            else:
                self.note(stage, left_out=str(case), baseline_seconds=one)
                continue
            for row in latency.measure(pipe, [case], methods, settings, lambda: None):
                compiled = {"compiled": True} if settings.compile else {}
                sampler = {"scheduler": settings.scheduler, "steps": settings.steps}
                self.note(stage, arch=settings.arch, **sampler, **compiled, **row)

    def probe(self, pipe: Any, case: latency.Case, settings: LatencySettings) -> float:
        """Seconds of the baseline in a case; next to none where memory does not do."""
        try:
            with (
                torch.no_grad(),
                latency.applied(self.method("baseline", settings), pipe, case, settings) as run,
            ):
                run()
                with Stopwatch(self.device) as watch:
                    run()
        except torch.OutOfMemoryError:
            return 0.05
        return watch.seconds.wall

    def method(self, name: str, settings: LatencySettings, backend: str = "sdpa") -> Method:
        """A method of the evaluation's, at the paper's usual ratio."""
        return parse_method(name, 0.4, settings.model_copy(update={"backend": backend}))

    def ceilings(self, stage: str) -> None:
        """What this card gives at most: matrix products and copies."""
        matrix = torch.randn(8192, 8192, device=self.device, dtype=torch.float16)
        big, other = torch.empty(2, 2 << 30, dtype=torch.uint8, device=self.device)
        for name, run, amount in (
            ("tflops", lambda: matrix @ matrix, 2 * 8192**3 / 1e12),
            ("tb_per_s", lambda: big.copy_(other), 2 * (2 << 30) / 1e12),
        ):
            run()
            with Stopwatch(self.device) as watch:
                for _ in range(10):
                    run()
            self.note(stage, **{name: 10 * amount / watch.seconds.wall})

    def table10(self, stage: str) -> None:
        """Seconds and GB of a call at each of the paper's ratios, unfused, in a batch of 8."""
        for ratio in (0.1, 0.2, 0.3, 0.4, 0.5):
            self.measured(
                stage,
                arch="sd15",
                scopes=["forward"],
                sizes=[self.small],
                batches=[8 if self.on_gpu else 1],
                backend="unfused",
                methods=["tomesd", "agentsd"],
                ratio=ratio,
                count=False,
            )

    def decoder(self, stage: str) -> None:
        """Seconds of the decoder alone, for one image and for eight."""
        vae = self.pipe_of("sd15").vae
        for size in (self.small, self.large):
            for batch in (1, 8) if self.on_gpu else (1,):
                shape = (batch, 4, size // 8, size // 8)
                latents = torch.zeros(shape, device=self.device, dtype=vae.dtype)
                rounds = []
                for _ in range(4 if self.on_gpu else 1):
                    with torch.no_grad(), Stopwatch(self.device) as watch:
                        vae.decode(latents)
                    rounds.append(watch.seconds.wall)
                self.note(stage, size=size, batch=batch, seconds=min(rounds))

    def memory(
        self, stage: str, arch: str, size: int, names: Sequence[str], backends: Sequence[str] = ("sdpa",)
    ) -> None:
        """Peaks of a run in GB, denoising and decoding apart, and what the allocator held in all."""
        pipe, settings = self.pipe_of(arch), self.asked(arch=arch, steps=9)
        pipe.scheduler = scheduler_like(pipe.scheduler, settings.scheduler)
        for backend in backends:
            for name in names:
                method = self.method(name, settings, backend)

                def call(count: int, method: Method = method) -> None:
                    case = latency.Case("pipeline", size, count)
                    with torch.no_grad(), latency.applied(method, pipe, case, settings) as run:
                        run()

                row = {"arch": arch, "size": size, "method": name, "backend": backend}
                try:
                    found = pipeline_memory(pipe, call)
                except torch.OutOfMemoryError:
                    self.note(stage, **row, out_of_memory=True)
                    torch.cuda.empty_cache()
                    continue
                if found is not None:
                    one, two = found.total
                    row |= {"denoising": found.denoising, "decoding": found.decoding, "per_image": two - one}
                    row["reserved"] = torch.cuda.max_memory_reserved() / 1e9
                self.note(stage, **row)

    def kernels(self, stage: str, names: Sequence[str]) -> None:
        """The device's own seconds in a guided call, its kernels, and which attention they are."""
        pipe, settings = self.pipe_of("sd15"), self.asked(arch="sd15")
        activity = torch.profiler.ProfilerActivity
        for scope in latency.PHASES:
            case = latency.Case(scope, self.large, 1)
            for name in names:
                with (
                    torch.no_grad(),
                    latency.applied(self.method(name, settings), pipe, case, settings) as run,
                ):
                    run()
                    kind = activity.CUDA if self.on_gpu else activity.CPU
                    with torch.profiler.profile(activities=[kind]) as profile:
                        run()
                        if self.on_gpu:
                            torch.cuda.synchronize()
                of_cuda = torch.autograd.DeviceType.CUDA
                events = [e for e in profile.key_averages() if not self.on_gpu or e.device_type == of_cuda]
                spent = {e.key: e.self_device_time_total or e.self_cpu_time_total for e in events}
                top = sorted(spent, key=spent.__getitem__, reverse=True)[:6]
                attends = [e for e in events if any(word in e.key.lower() for word in KERNELS_OF_ATTENTION)]
                self.note(
                    stage,
                    scope=scope,
                    size=self.large,
                    method=name,
                    device_seconds=sum(spent.values()) / 1e6,
                    kernels=sum(e.count for e in events),
                    top={key[:70]: round(spent[key] / 1e3, 3) for key in top},
                    attention={e.key[:90]: e.count for e in attends},
                )

    def waits(self, stage: str, names: Sequence[str]) -> None:
        """Where the host waits for the device in a run of each mode; whether two runs give the same image."""
        pipe, settings = self.pipe_of("sd15"), self.asked(arch="sd15")
        pipe.scheduler = scheduler_like(pipe.scheduler, settings.scheduler)
        case = latency.Case("pipeline", self.small, 1)
        for name in names:
            images, told = [], []
            for again in (False, True):
                method = self.method(name, settings)
                with (
                    torch.no_grad(),
                    latency.applied(method, pipe, case, settings) as run,
                    warnings.catch_warnings(record=True) as caught,
                ):
                    warnings.simplefilter("always")
                    if again and self.on_gpu:
                        torch.cuda.set_sync_debug_mode("warn")
                    try:
                        images.append(np.asarray(run().images[0]))
                    finally:
                        if self.on_gpu:
                            torch.cuda.set_sync_debug_mode("default")
                told = [word for word in caught if "synchroniz" in str(word.message)]
            where = collections.Counter(f"{Path(word.filename).name}:{word.lineno}" for word in told)
            same = bool((images[0] == images[1]).all())
            self.note(stage, method=name, waits=len(told), where=dict(where.most_common(8)), same_image=same)
