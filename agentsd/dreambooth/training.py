"""The DreamBooth run: load, train with agent attention, checkpoint, save."""

from __future__ import annotations

import importlib.util
import itertools
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from diffusers import DDPMScheduler, StableDiffusionPipeline
from diffusers.optimization import get_scheduler
from diffusers.training_utils import cast_training_params
from rich.progress import Progress

from ..apply import apply_agentsd, remove_agentsd
from ..sampler import Sampler
from .checkpoints import check_space, find_checkpoint, list_checkpoints, save_checkpoint, step_of
from .config import DreamBoothConfig
from .data import SubjectImages, find_images
from .images import fill_class_folder, generate, save_grid
from .pretrained import load_pretrained
from .step import TARGETS, diffusion_loss, without_cudnn_attention

logger = logging.getLogger(__name__)
LORA_LAYERS = ["to_q", "to_k", "to_v", "to_out.0"]


@dataclass
class Run:
    """A DreamBooth run. `Run(config).train()` returns the output folder.

    Raises (from the constructor, before anything is loaded): ValueError for image folders or a checkpoint
    that are not there or cannot be read; OSError for an output folder that cannot be written. From `train`,
    before the first step: OSError for a disk without room.
    """

    config: DreamBoothConfig
    progress: Progress | None = None
    step: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        config = self.config
        self.instance = find_images(config.instance_data_dir)
        self._check_precision()
        config.output_dir.mkdir(parents=True, exist_ok=True)
        self._check_output()
        self.resume = None
        if config.resume_from_checkpoint is not None:
            self.resume = find_checkpoint(config.output_dir, config.resume_from_checkpoint)
        self.accelerator = Accelerator(
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            mixed_precision=config.mixed_precision,
            log_with=self._tracker(),
            project_dir=str(config.output_dir / "logs"),
        )

    def _check_precision(self) -> None:
        """Refuse what a gradient scaler can't do: half precision on the CPU and on Apple's GPU."""
        scales = torch.accelerator.is_available() and not torch.backends.mps.is_available()
        if self.config.mixed_precision == "fp16" and not scales:
            raise ValueError("mixed_precision='fp16' needs a CUDA device: pass 'bf16' or 'no'")

    def _check_output(self) -> None:
        """Refuse to write over what is in the output folder, but for a run that goes on there."""
        folder = self.config.output_dir
        there = sorted(path.name for path in folder.iterdir() if path.name[0] != "." and path.name != "logs")
        if there and (self.config.resume_from_checkpoint is None or not list_checkpoints(folder)):
            raise ValueError(
                f"output_dir={str(folder)!r} holds {there[0]}, which the run might overwrite: choose another "
                "folder, or go on with a run's checkpoints by --resume_from_checkpoint latest"
            )

    def train(self) -> Path:
        """Train to `max_train_steps`, save the model, its agent settings and a grid of images."""
        config, accelerator = self.config, self.accelerator
        self.pipe = self._load()
        images = self._images()
        self.pipe.unet.train()
        if config.apply == "train+generate":
            self.handle = apply_agentsd(self.pipe.unet, recipe=config.recipe)
        modules, parameters = self._trainable()
        self._check_space(parameters)
        optimizer = self._optimizer(parameters)
        rate = get_scheduler(
            config.lr_scheduler,
            optimizer,
            num_warmup_steps=config.lr_warmup_steps,
            num_training_steps=config.max_train_steps,
        )
        *prepared, optimizer = accelerator.prepare(*modules.values(), optimizer)
        models = dict(zip(modules, prepared, strict=True))
        if self.resume is not None:
            accelerator.load_state(str(self.resume))
            self.step = step_of(self.resume)
            # Set here, not saved: accelerate would unpickle what is registered with it.
            rate.last_epoch = self.step
            rate._last_lr = [group["lr"] for group in optimizer.param_groups]
        if accelerator.log_with:
            accelerator.init_trackers("dreambooth")

        bar = self._bar("training", config.max_train_steps, self.step)
        while self.step < config.max_train_steps:
            loss = self._optimise(models, parameters, optimizer, rate, images)
            self.step += 1
            memory = torch.cuda.max_memory_allocated() / 2**30 if accelerator.device.type == "cuda" else 0.0
            accelerator.log(
                {"loss": loss, "lr": rate.get_last_lr()[0], "peak_memory_gib": memory}, step=self.step
            )
            bar()
            if self.step % config.checkpointing_steps == 0:
                save_checkpoint(accelerator, config.output_dir, self.step, config.checkpoints_total_limit)
            if config.validation_prompt and self.step % config.validation_steps == 0:
                self._validate()
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            self._save()
        accelerator.end_training()
        return config.output_dir

    @without_cudnn_attention()
    def _optimise(
        self, models: dict[str, Any], parameters: list[Any], optimizer: Any, rate: Any, images: SubjectImages
    ) -> float:
        """One step of the optimizer, over `gradient_accumulation_steps` batches; returns the mean loss."""
        config, accelerator = self.config, self.accelerator
        text_encoder = models.get("text_encoder", self.pipe.text_encoder)
        prior = config.prior_loss_weight if images.classes else None
        losses = []
        for part in range(config.gradient_accumulation_steps):
            draw = self.step * config.gradient_accumulation_steps + part
            batch = images.draw(config.train_batch_size, config.seed, draw, accelerator.process_index)
            with accelerator.accumulate(*models.values()):
                with accelerator.autocast():  # and not the backward, which would keep its copies of weights
                    loss = diffusion_loss(
                        self.pipe.vae, text_encoder, models["unet"], self.schedule, batch, prior
                    )
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(parameters, config.max_grad_norm)
                    # A gradient scaler skips such a step itself, and begins with some.
                    if accelerator.scaler is None and not torch.isfinite(norm):
                        raise FloatingPointError(
                            f"the gradients of step {self.step + 1} are not finite: their norm is {norm:g}. "
                            "The step was not taken. Resume from the last checkpoint with "
                            "mixed_precision='no' or a smaller learning_rate"
                        )
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        rate.step()
        return float(torch.stack(losses).mean())

    def _load(self) -> Any:
        """The pipeline on the run's device, frozen; what is not trained in the run's precision."""
        config, device = self.config, self.accelerator.device
        pipe = _source(config)
        pipe.set_progress_bar_config(disable=True)
        self.schedule = DDPMScheduler.from_config(pipe.scheduler.config)
        kind = self.schedule.config.prediction_type
        if Sampler(pipe.scheduler, ()).is_flow:  # whose config says nothing, or what no other schedule knows
            kind = "flow_prediction"
        if kind not in TARGETS:
            raise ValueError(
                f"the model predicts {kind!r}, which is not trained here: take one of {', '.join(TARGETS)}"
            )
        dtype = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[config.mixed_precision]
        for module in (pipe.vae, pipe.text_encoder, pipe.unet):
            module.requires_grad_(False)
        pipe.vae.to(device, dtype)
        pipe.text_encoder.to(device, torch.float32 if config.train_text_encoder else dtype)
        pipe.unet.to(device, dtype if config.lora_rank else torch.float32)
        return pipe

    def _images(self) -> SubjectImages:
        config, pipe = self.config, self.pipe
        classes: list[Path] = []
        if config.with_prior_preservation:
            if self.accelerator.is_main_process:
                bar = self._bar("class images", config.num_class_images)
                with self.accelerator.autocast():
                    fill_class_folder(pipe, config, bar)
            self.accelerator.wait_for_everyone()
            assert config.class_data_dir is not None
            classes = find_images(config.class_data_dir)

        def tokens(prompt: str) -> Any:
            return pipe.tokenizer(
                prompt,
                padding="max_length",
                truncation=True,
                max_length=pipe.tokenizer.model_max_length,
                return_tensors="pt",
            ).input_ids

        size = config.resolution or pipe.unet.config.sample_size * pipe.vae_scale_factor
        return SubjectImages(
            self.instance, classes, tokens(config.instance_prompt), tokens(config.class_prompt or ""), size
        )

    def _trainable(self) -> tuple[dict[str, Any], list[torch.nn.Parameter]]:
        """The modules that are trained, and their parameters, in float32 (a gradient scaler needs that)."""
        config, pipe = self.config, self.pipe
        modules = {"unet": pipe.unet}
        if config.lora_rank is not None:
            _add_lora(pipe.unet, config.lora_rank, config.seed)
        else:
            pipe.unet.requires_grad_(True)
        if config.train_text_encoder:
            modules["text_encoder"] = pipe.text_encoder.requires_grad_(True)
        for module in modules.values():
            module.train()
            cast_training_params(module, torch.float32)
        if config.gradient_checkpointing:
            pipe.unet.enable_gradient_checkpointing()
            if config.train_text_encoder:
                pipe.text_encoder.gradient_checkpointing_enable()
        every = itertools.chain.from_iterable(m.parameters() for m in modules.values())
        return modules, [p for p in every if p.requires_grad]

    def _check_space(self, parameters: list[torch.nn.Parameter]) -> None:
        trained = sum(p.nbytes for p in parameters)
        parts = () if self.config.lora_rank else (self.pipe.unet, self.pipe.vae, self.pipe.text_encoder)
        model = sum(4 * p.numel() for part in parts for p in part.parameters())
        check_space(self.config.output_dir, model, trained, self.config.checkpoints_total_limit)

    def _optimizer(self, parameters: list[torch.nn.Parameter]) -> Any:
        if self.config.use_8bit_adam:
            if self.accelerator.device.type == "cuda" and importlib.util.find_spec("bitsandbytes"):
                import bitsandbytes

                return bitsandbytes.optim.AdamW8bit(parameters, lr=self.config.learning_rate)
            logger.warning(
                "8-bit AdamW needs a CUDA device and bitsandbytes (pip install bitsandbytes); "
                "plain AdamW runs"
            )
        return torch.optim.AdamW(parameters, lr=self.config.learning_rate)

    def _validate(self) -> None:
        """Images of the validation prompt, to the tracker and to the output folder."""
        config, accelerator = self.config, self.accelerator
        if accelerator.is_main_process:
            assert config.validation_prompt is not None
            with accelerator.autocast():
                made = generate(self.pipe, config.validation_prompt, config.num_validation_images, config)
            save_grid(made, config.output_dir / f"validation-{self.step}.png")
            for tracker in accelerator.trackers:
                if tracker.name == "tensorboard":
                    images = np.stack([np.asarray(image) for image in made])
                    tracker.writer.add_images("validation", images, self.step, dataformats="NHWC")
        accelerator.wait_for_everyone()

    def _save(self) -> None:
        """The model (or LoRA weights), `agentsd.json` and `grid.png`."""
        config, pipe = self.config, self.pipe
        prompt = config.validation_prompt or config.instance_prompt
        with self.accelerator.autocast():
            made = generate(pipe, prompt, config.num_validation_images, config)
        save_grid(made, config.output_dir / "grid.png")
        if config.attention != "agent":
            self.handle.save(config.output_dir)
        remove_agentsd(pipe.unet)
        if config.lora_rank is not None:
            from peft import get_peft_model_state_dict

            layers = get_peft_model_state_dict(pipe.unet)
            StableDiffusionPipeline.save_lora_weights(config.output_dir, unet_lora_layers=layers)
        else:
            whole = _source(config)  # what was not trained is saved as it came, not in the run's precision
            whole.unet = pipe.unet
            if config.train_text_encoder:
                whole.text_encoder = pipe.text_encoder
            whole.save_pretrained(config.output_dir)
        if config.apply != "none":
            config.recipe.save(config.output_dir)

    def _tracker(self) -> str | None:
        name = self.config.report_to
        if name == "none":  # as diffusers' scripts say it
            return None
        if name == "tensorboard" and not importlib.util.find_spec("tensorboard"):
            logger.warning("tensorboard is not installed (pip install tensorboard): nothing is logged")
            return None
        return name

    def _bar(self, title: str, total: int, done: int = 0) -> Any:
        """A function that advances a progress bar by one."""
        if self.progress is None or not self.accelerator.is_main_process:
            return lambda: None
        task = self.progress.add_task(title, total=total, completed=done)
        return lambda: self.progress.advance(task)


def _add_lora(unet: Any, rank: int, seed: int) -> None:
    """LoRA layers that start as peft's "gaussian" ones do, from a generator of their own."""
    from peft import LoraConfig

    with torch.device("meta"):  # where nothing is drawn: the user's random state is not touched
        unet.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=LORA_LAYERS))
    rng = torch.Generator("cpu").manual_seed(seed)
    for name, module in unet.named_modules():
        if name.endswith((".lora_A.default", ".lora_B.default")):
            module.to_empty(device="cpu")
            if ".lora_A." in name:
                torch.nn.init.normal_(module.weight, std=1 / rank, generator=rng)
            else:
                torch.nn.init.zeros_(module.weight)
            module.to(unet.device, unet.dtype)


def _source(config: DreamBoothConfig) -> Any:
    """The pipeline that is finetuned, as it came, in float32."""
    if config.pretrained_model_name_or_path == "demo":
        from ..demo import load_pipeline

        return load_pipeline()
    return load_pretrained(StableDiffusionPipeline, config.pretrained_model_name_or_path)
