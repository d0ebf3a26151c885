"""The DreamBooth run: train with agent attention, checkpoint, save, and draw what came of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import AutocastKwargs, InitProcessGroupKwargs
from diffusers import DDPMScheduler
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.optimization import get_scheduler
from rich.progress import Progress
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader

from ..apply import apply_agentsd
from .checkpoints import (
    check_settings,
    check_space,
    keep_trained,
    resolve_settings,
    save_checkpoint,
    step_of,
)
from .config import DreamBoothConfig
from .data import Batch
from .inputs import encode, make_class_images, make_inputs
from .models import load_source, make_trainable, trained_in
from .optimizer import in_8_bits, make_optimizer, moment_bytes
from .preflight import check_device, check_files, claim_repository, find_tracker
from .results import finish, or_a_warning, validate
from .step import diffusion_loss

# Not cuDNN's, PyTorch's choice on an H100 and an H200: its backward pass gives NaN there with torch 2.11
# (pytorch/pytorch issue 196678).
_SOUND_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass
class Run:
    """A DreamBooth run. `Run(config).train()` returns the output folder.

    Raises (from the constructor, before anything is loaded): ValueError for image folders or a checkpoint
    that are not there or cannot be read, and for what the machine lacks; OSError for an output folder that
    cannot be written. From `train`, before the first image: OSError for a disk without room, ValueError and
    OSError for a model that can't be loaded or trained.
    """

    config: DreamBoothConfig
    progress: Progress | None = None
    step: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        config = self.config
        check_device(config)
        self.instance, classes, self.resume = check_files(config)
        tracker = find_tracker(config)
        self.accelerator = Accelerator(
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            mixed_precision=config.precision,
            log_with=tracker,
            project_dir=str(config.output_dir / config.logging_dir),
            kwargs_handlers=[
                AutocastKwargs(cache_enabled=False),  # of all weights in half precision, until a batch ends
                InitProcessGroupKwargs(timeout=timedelta(days=1)),  # others wait where one draws or saves
            ],
        )
        self.device = self.accelerator.device
        self.eight_bits = in_8_bits(config, self.device)
        settings = self._settings(classes)
        self.total = settings["max_train_steps"]
        if self.resume is not None:
            check_settings(self.resume, settings)
            self.step = step_of(self.resume)
        config.output_dir.mkdir(parents=True, exist_ok=True)
        if config.allow_tf32:
            torch.set_float32_matmul_precision("high")
        self.repository = claim_repository(config) if self.accelerator.is_main_process else None

    def train(self) -> Path:
        """Train to `max_train_steps`, save the model and its agent settings, and draw a grid of images."""
        config, accelerator = self.config, self.accelerator
        self.pipe = load_source(config)
        self.pipe.set_progress_bar_config(disable=True)
        self.schedule = DDPMScheduler.from_config(self.pipe.scheduler.config)
        self.modules = make_trainable(self.pipe, config)
        self._check_space()
        classes = make_class_images(config, accelerator, self._bar)
        settings = self._settings(classes)
        for part in (self.pipe.vae, self.pipe.text_encoder, self.pipe.unet):
            part.to(self.device)
        images = make_inputs(self.pipe, config, accelerator, self.instance, classes)

        self.handle = None
        if config.apply == "train+generate":
            self.handle = apply_agentsd(self.pipe.unet, recipe=config.recipe)
        trained = trained_in(self.modules)  # attention's own weights among them
        optimizer = make_optimizer(config, trained, self.device, accelerator.num_processes)
        rate = get_scheduler(
            config.lr_scheduler,
            optimizer,
            num_warmup_steps=config.lr_warmup_steps,
            num_training_steps=self.total,
            num_cycles=config.lr_num_cycles,
            power=config.lr_power,
        )
        *prepared, optimizer = accelerator.prepare(*self.modules.values(), optimizer)
        models = dict(zip(self.modules, prepared, strict=True))
        keep_trained(accelerator, list(self.modules.values()))
        if self.resume is not None:
            accelerator.load_state(str(self.resume), strict=False)
            # Set here, not saved: accelerate would unpickle what is registered with it.
            rate.last_epoch = self.step
            rate._last_lr = [group["lr"] for group in optimizer.param_groups]
        with or_a_warning("the tracker"):
            accelerator.init_trackers("dreambooth")

        parts = config.gradient_accumulation_steps
        numbers = range(self.step * parts, self.total * parts)
        batches = iter(
            DataLoader(
                images,
                batch_size=None,
                sampler=numbers,
                num_workers=config.dataloader_num_workers,
                generator=torch.Generator("cpu"),  # of the workers' seeds, in place of the user's
            )
        )
        every = config.validation_steps
        if config.validation_epochs is not None:
            passed = max(len(self.instance), len(classes))
            every = config.validation_epochs * config.epoch(passed, accelerator.num_processes)
        bar = self._bar("training", self.total, self.step)
        while self.step < self.total:
            loss = self._optimise(models, trained, optimizer, rate, batches)
            self.step += 1
            self._log(loss, float(rate.get_last_lr()[0]))
            bar()
            if self.step % config.checkpointing_steps == 0 or self.step == self.total:
                save_checkpoint(accelerator, config, settings, self.step)
            if config.validation_prompt and self.step % every == 0:
                with or_a_warning("validation"):
                    if accelerator.is_main_process:
                        validate(
                            self.pipe, config.validation_prompt, config, accelerator, self.step, self._bar
                        )
                accelerator.wait_for_everyone()
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            finish(self.pipe, self.modules, self.handle, config, accelerator, self.repository, self._bar)
        with or_a_warning("the tracker"):
            accelerator.end_training()
        return config.output_dir

    @sdpa_kernel(_SOUND_ATTENTION)
    def _optimise(
        self, models: dict[str, Any], trained: list[Any], optimizer: Any, rate: Any, batches: Iterator[Batch]
    ) -> float:
        """One step of the optimizer, over `gradient_accumulation_steps` batches; returns the mean loss."""
        config, accelerator = self.config, self.accelerator
        losses = []
        for _ in range(config.gradient_accumulation_steps):
            batch = next(batches)
            with accelerator.accumulate(*models.values()):
                with accelerator.autocast():  # and not the backward, which would keep its copies of weights
                    loss = self._loss(models, batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(trained, config.max_grad_norm)
                    # A gradient scaler skips such a step itself, and begins with some.
                    if accelerator.scaler is None and not torch.isfinite(norm):
                        raise FloatingPointError(
                            f"the gradients of step {self.step + 1} are not finite: their norm is {norm:g}. "
                            "The step was not taken. Resume from the last checkpoint with "
                            "mixed_precision='no' or a smaller learning_rate"
                        )
                optimizer.step()
                optimizer.zero_grad(set_to_none=config.set_grads_to_none)
            losses.append(loss.detach())
        rate.step()
        return float(torch.stack(losses).mean())

    def _loss(self, models: dict[str, Any], batch: Batch) -> Tensor:
        """The loss of a batch, of which dropout and all else that is random follow from its seed."""
        config, rng = self.config, torch.Generator("cpu").manual_seed(batch.seed)
        moments, text = batch.images.to(self.device), batch.text.to(self.device)
        if not config.cache_latents:
            moments = encode(self.pipe.vae, moments)
        latents = DiagonalGaussianDistribution(moments).sample(rng).float()
        with _dropout_from(batch.seed) if config.lora_dropout > 0 else nullcontext():
            if not config.pre_compute_text_embeddings:
                text = models.get("text_encoder", self.pipe.text_encoder)(text)[0]
            return diffusion_loss(
                models["unet"],
                self.schedule,
                latents * self.pipe.vae.config.scaling_factor,
                text,
                rng,
                prior_weight=config.prior_loss_weight if config.with_prior_preservation else None,
                snr_gamma=config.snr_gamma,
                offset_noise=config.offset_noise,
            )

    def _settings(self, classes: list[Path]) -> dict[str, Any]:
        processes = self.accelerator.num_processes
        return resolve_settings(self.config, self.instance, classes, self.eight_bits, processes)

    def _check_space(self) -> None:
        trained = trained_in(self.modules)
        checkpoint = sum(p.nbytes for p in trained) + moment_bytes(trained, self.eight_bits)
        parts = () if self.config.rank else (self.pipe.unet, self.pipe.vae, self.pipe.text_encoder)
        model = sum(4 * p.numel() for part in parts for p in part.parameters())
        every, limit = self.config.checkpointing_steps, self.config.checkpoints_total_limit
        to_come = -(-self.total // every) - self.step // every if self.step < self.total else 0
        check_space(self.config.output_dir, model, checkpoint, limit, to_come)

    def _log(self, loss: float, rate: float) -> None:
        values = {"loss": loss, "lr": rate}
        if self.device.type == "cuda":
            values["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        with or_a_warning("the tracker"):
            self.accelerator.log(values, step=self.step)

    def _bar(self, title: str, total: int, done: int = 0) -> Any:
        """A function that advances a progress bar by one."""
        if self.progress is None or not self.accelerator.is_main_process:
            return lambda: None
        task = self.progress.add_task(title, total=total, completed=done)
        return lambda: self.progress.advance(task)


@contextmanager
def _dropout_from(seed: int) -> Iterator[None]:
    """Dropout draws from PyTorch's global generators alone: they are lent, and put back."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
