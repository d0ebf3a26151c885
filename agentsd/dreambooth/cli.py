"""The commands `agentsd-dreambooth` and `agentsd-dreambooth-lora`, made of the settings."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click
from pydantic import ValidationError

from ..command_line import SettingsCommand, explain, parameters_of, settings_of
from .config import DreamBoothConfig, LoraConfig
from .yaml_file import read_mapping

GROUPS = {
    "Model": "pretrained_model_name_or_path revision variant tokenizer_name",
    "Images": "instance_data_dir instance_prompt class_data_dir class_prompt with_prior_preservation "
    "prior_loss_weight num_class_images sample_batch_size prior_generation_precision resolution center_crop",
    "Agent attention": "attention apply ratio k scale",
    "What is trained, and how long": "train_text_encoder rank lora_dropout train_batch_size num_train_epochs "
    "max_train_steps gradient_accumulation_steps seed snr_gamma offset_noise",
    "Optimizer": "learning_rate scale_lr lr_scheduler lr_warmup_steps lr_num_cycles lr_power use_8bit_adam "
    "adam_beta1 adam_beta2 adam_weight_decay adam_epsilon max_grad_norm set_grads_to_none",
    "Memory and speed": "dry_run gradient_checkpointing cache_latents pre_compute_text_embeddings "
    "mixed_precision allow_tf32 enable_xformers_memory_efficient_attention dataloader_num_workers",
    "Validation": "validation_prompt validation_steps validation_epochs num_validation_images "
    "num_inference_steps guidance_scale",
    "Output": "",
}
"""Settings under each head of the help; the last one has the others."""


def _run(kind: type[DreamBoothConfig], config: str | None, dry_run: bool, **options: Any) -> None:
    """Train, or say what it takes; what is wrong ends the command with a line and an exit code."""
    given, path = settings_of(options), Path(config) if config else None
    settings = None
    try:
        settings = kind.model_validate((read_mapping(path) if path else {}) | given)
        for line in _dry(settings) if dry_run else _train(settings):
            click.echo(line)
        return
    except ValidationError as error:
        lines = explain(kind, error, given, path, join="_")
    except OSError as error:
        named = f"{error.filename}: {error.strerror}; name another"
        lines = [named if error.filename else " ".join(str(error).split())]
    except (ValueError, FloatingPointError) as error:
        lines = [str(error)]
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":
            raise
        lines = [
            f"{' '.join(str(error).split())[:200]}; --dry_run says what a step takes, and what takes less; a "
            "run with a checkpoint goes on with --resume_from_checkpoint latest"
        ]
    except KeyboardInterrupt:
        click.echo("stopped" if dry_run or settings is None else _stopped(settings.output_dir), err=True)
        raise SystemExit(130) from None
    for line in lines:
        click.echo(f"error: {line}", err=True)
    raise SystemExit(2)


def _stopped(folder: Path) -> str:
    """What is left of a run that the user stopped."""
    from .checkpoints import list_checkpoints

    have = list_checkpoints(folder)
    if have:
        return f"stopped; with --resume_from_checkpoint latest it goes on from {have[-1]}"
    return "stopped before the first checkpoint, so nothing is kept (--checkpointing_steps says how often)"


def _train(settings: DreamBoothConfig) -> list[str]:
    from rich.console import Console

    from ..progress import progress
    from .training import Run

    with progress(Console()) as bars:
        run = Run(settings, bars)
        run.accelerator.print(f"{len(run.instance)} images of the subject")
        if settings.resume_from_checkpoint:
            found = f"going on from {run.resume.name}" if run.resume else "no checkpoint: beginning at step 0"
            run.accelerator.print(f"{settings.output_dir}: {found}")
        folder = run.train()
    grid = "grid.png and " if (folder / "grid.png").exists() else ""
    return [f"saved to {folder}; {grid}checkpoints are beside it"]


def _dry(settings: DreamBoothConfig) -> list[str]:
    from .memory import report

    return report(settings)


def _launched_otherwise(ctx: click.Context, option: click.Parameter, rank: str | None) -> None:
    if rank is not None:
        raise click.UsageError("--local_rank is not accepted: use accelerate launch")


def _command(kind: type[DreamBoothConfig]) -> SettingsCommand:
    options: list[click.Parameter] = [
        click.Option(["--config"], metavar="FILE", help="YAML of settings; options override it."),
        click.Option(["--dry_run"], is_flag=True, help="Only say if a step's memory fits."),
        click.Option(["--local_rank"], hidden=True, expose_value=False, callback=_launched_otherwise),
        *parameters_of(kind, arguments=False, join="_"),
    ]
    return SettingsCommand(
        "agentsd-dreambooth",
        kind,
        GROUPS,
        options,
        help="Finetune a subject into Stable Diffusion with agent attention in every step.",
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
        callback=partial(_run, kind),
    )


dreambooth, dreambooth_lora = _command(DreamBoothConfig), _command(LoraConfig)
