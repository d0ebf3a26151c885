"""One training loop for both parts: budget, learning rate, averaged weights, log and checkpoints."""

import json
import math
import os
import random
import time
from bisect import bisect
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from diffusers.models.upsampling import Upsample2D
from diffusers.training_utils import EMAModel
from rich import print
from torch import Tensor, nn

from .config import LoopConfig, Stage

CHECKPOINT, LOG = "checkpoint.pt", "log.jsonl"


def save_atomically(state: dict[str, Any], path: Path) -> None:
    """Write a checkpoint so that an interruption leaves the old one or the new one."""
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def lr_factor(step: int, done: float, warmup: int) -> float:
    """Return the learning rate's factor: a linear warm-up over steps, a cosine to 0 over `done` in [0, 1]."""
    return min(1.0, (step + 1) / max(1, warmup)) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def size_at(stages: Sequence[Stage], done: float, seed: str) -> int:
    """Return an image size in pixels, drawn among those of the stage at `done` in [0, 1)."""
    stage = next(s for s in stages if done < s.until or s is stages[-1])
    shares = list(accumulate(stage.sizes.values()))
    return list(stage.sizes)[bisect(shares, random.Random(seed).random() * shares[-1])]


def compile_loss(loss: nn.Module) -> None:
    """Compile a module in place, its upsamplers left out.

    In torch 2.13 on a CPU under bfloat16 autocast, the compiled backward of a whole autoencoder gives zero
    gradients to everything before an upsampler; without them it agrees with eager mode and is as fast.
    """
    for module in loss.modules():
        if isinstance(module, Upsample2D):
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
    # Each graph that is cut at an upsampler meets its blocks in every shape.
    torch._dynamo.config.recompile_limit = 64
    loss.compile(dynamic=False)


class _Log:
    """Rows of a training log: the mean loss and the images a second since the row before."""

    def __init__(self, path: Path, batch: int, seconds: float) -> None:
        self.losses: list[Tensor] = []
        self._path, self._batch, self._seconds = path, batch, seconds

    def write(self, step: int, seconds: float, lr: float) -> None:
        """Write a row, if there is anything for one."""
        if not self.losses:
            return
        row = {"step": step, "minutes": round(seconds / 60, 2), "lr": lr}
        row["loss"] = torch.stack(self.losses).mean().item()
        row["images_per_s"] = self._batch * len(self.losses) / max(seconds - self._seconds, 1e-9)
        self.losses.clear()
        self._seconds = seconds
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def train_loop(
    model: nn.Module,
    loss_at: Callable[[torch.Generator, int], Tensor],
    config: LoopConfig,
    folder: Path,
    *,
    seed: int,
    device: torch.device,
    every: tuple[int, Callable[[int], None]] | None = None,
) -> None:
    """Train `model` until its budget is spent and leave its averaged weights in it.

    `loss_at` draws the batch of a step with the generator it is given, which depends on the seed and the step
    alone, so that a resumed run repeats an uninterrupted one. `every` is a number of steps and what to call
    then, with the averaged weights in place. The folder gets `checkpoint.pt` and `log.jsonl`. Raises
    RuntimeError for gradients that are not finite, before they reach the weights.
    """
    # Its backward pass gives NaN on an H100 and an H200 (torch 2.11, cuDNN 9).
    torch.backends.cuda.enable_cudnn_sdp(False)
    folder.mkdir(parents=True, exist_ok=True)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=config.lr, weight_decay=config.weight_decay, betas=(0.9, 0.99), fused=True
    )
    ema = EMAModel(parameters, decay=config.ema_decay, foreach=True)
    step, seconds = 0, 0.0
    if (folder / CHECKPOINT).exists():
        state = torch.load(folder / CHECKPOINT, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        ema.load_state_dict(state["ema"])
        step, seconds = state["step"], state["seconds"]
        print(f"{folder.name}: resuming at step {step}, {seconds / 60:.1f} min")

    def save() -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "ema": ema.state_dict()}
        save_atomically({**state, "step": step, "seconds": seconds}, folder / CHECKPOINT)

    def done() -> float:
        spent = seconds / (60 * config.max_minutes) if config.max_minutes else 0.0
        return max(step / config.steps, spent)

    generator = torch.Generator("cpu")
    log = _Log(folder / LOG, config.batch, seconds)
    started = time.perf_counter() - seconds
    model.train()
    try:
        while done() < 1:
            lr = config.lr * lr_factor(step, done(), config.warmup)
            for group in optimizer.param_groups:
                group["lr"] = lr
            with torch.autocast(device.type, torch.bfloat16, enabled=config.bf16):
                loss = loss_at(generator.manual_seed(hash((seed, step))), step)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)
            optimizer.step()
            ema.step(parameters)
            log.losses.append(loss.detach())
            step += 1
            seconds = time.perf_counter() - started
            if step % config.log_every == 0:
                log.write(step, seconds, lr)
            if step % config.save_every == 0:
                save()
            if every is not None and step % every[0] == 0:
                ema.store(parameters)
                ema.copy_to(parameters)
                model.eval()
                every[1](step)
                model.train()
                ema.restore(parameters)
        log.write(step, seconds, optimizer.param_groups[0]["lr"])  # a run may end between two rows
    finally:
        save()
    ema.copy_to(parameters)
    model.eval()


def averaged_weights(model: nn.Module, folder: Path, config: LoopConfig, device: torch.device) -> None:
    """Load a checkpoint's averaged weights into `model`; a folder without one raises FileNotFoundError."""
    state = torch.load(folder / CHECKPOINT, map_location=device, weights_only=True)
    model.load_state_dict(state["model"])
    parameters = [p for p in model.parameters() if p.requires_grad]
    ema = EMAModel(parameters, decay=config.ema_decay)
    ema.load_state_dict(state["ema"])
    ema.copy_to(parameters)
    model.eval()
