"""Options that commands share; a None leaves the setting to the configuration or its default."""

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[
    Path | None, typer.Option("--config", help="YAML file of settings; options here override it.")
]
Model = Annotated[str | None, typer.Option(help="'demo' (embedded), a folder, or a hub id.")]
Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        help="stock, tomesd, agentsd (-fast, -turbo), deepcache, or agentsd+deepcache; limit (-all): without "
        "the finest level's (every) self-attention core, for its cost alone; repeat.",
    ),
]
Steps = Annotated[int | None, typer.Option(help="Denoising steps.")]
Guidance = Annotated[float | None, typer.Option("--guidance", help="Guidance scale; 1 or less turns it off.")]
SchedulerName = Annotated[
    str | None, typer.Option("--scheduler", help="plms, ddim, ddpm, euler, dpm++ or model (its own).")
]
Seed = Annotated[int | None, typer.Option(help="Picture i has seed + i.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 ...; default: CUDA if there is one.")]
Precision = Annotated[str | None, typer.Option("--dtype", help="float32, float16 or bfloat16.")]
Backend = Annotated[str | None, typer.Option(help="Attention of the baseline: sdpa (fused) or unfused.")]
Height = Annotated[int | None, typer.Option(help="Pixels, a multiple of 8; default: the model's own.")]
Width = Annotated[int | None, typer.Option(help="Pixels, a multiple of 8; default: the model's own.")]
Ratio = Annotated[float | None, typer.Option("--ratio", help="Share of the tokens that is merged.")]
Agent = Annotated[
    list[str] | None,
    typer.Option("--agent", metavar="KEY=VALUE", help="A setting of apply_agentsd, such as k=0.05; repeat."),
]
Images = Annotated[int | None, typer.Option(help="Pictures for each row.")]
BatchSize = Annotated[int | None, typer.Option(help="Pictures made at once.")]
Prompts = Annotated[Path | None, typer.Option(help="A text file, one prompt a line.")]
Classes = Annotated[Path | None, typer.Option(help="A text file, one class name a line.")]
Reference = Annotated[Path | None, typer.Option(help="A folder of real pictures.")]
Features = Annotated[str | None, typer.Option(help="efficientnet-lite0, or inception for real FID.")]
InceptionWeights = Annotated[Path | None, typer.Option(help="pytorch-fid's weights file, if not downloaded.")]
RunOut = Annotated[Path | None, typer.Option(help="The run's folder; the same folder resumes it.")]
Clip = Annotated[str | None, typer.Option(help="A CLIP model (folder or hub id) for the CLIP score.")]
PromptTexts = Annotated[
    list[str] | None, typer.Option("--prompt", help="A prompt; repeat. Default: the embedded model's own.")
]
Ratios = Annotated[list[float] | None, typer.Option("--ratio", help="Share of the tokens merged; repeat.")]
Values = Annotated[
    list[float] | None, typer.Option("--value", help="A value to try; repeat. Default: the paper's.")
]
MediatorCounts = Annotated[
    list[int] | None, typer.Option("--count", help="Agents in a stage, few first; repeat.")
]
MediatorStep = Annotated[
    float | None, typer.Option("--threshold-step", help="Between thresholds, from 1 to 0.")
]
Arch = Annotated[str | None, typer.Option(help="sd15 or sdxl with random weights, in place of a model.")]
Sizes = Annotated[list[int] | None, typer.Option("--size", help="Pixels on a side; repeat.")]
Batches = Annotated[list[int] | None, typer.Option("--batch", help="Pictures at once; repeat.")]
Scopes = Annotated[
    list[str] | None, typer.Option("--scope", help="forward (one U-Net call), pipeline or training; repeat.")
]
Phases = Annotated[list[str] | None, typer.Option("--phase", help="early or late steps; repeat.")]
Repeats = Annotated[int | None, typer.Option(help="Timed rounds; the median counts.")]
Backends = Annotated[list[str] | None, typer.Option("--backend", help="sdpa or unfused; repeat.")]
MeasuredSteps = Annotated[
    int | None, typer.Option(help="Denoising steps that are measured, spread evenly from first to last.")
]
ExactTokens = Annotated[
    int | None, typer.Option(help="Up to so many tokens all pairs of queries count; above, a seeded sample.")
]
Pairs = Annotated[int | None, typer.Option(help="Size of that sample for each layer, step and picture.")]
TrainSteps = Annotated[int | None, typer.Option(help="Training steps of each finetuning, at batch 1.")]
LearningRate = Annotated[float | None, typer.Option(help="Learning rate of each finetuning.")]
SubjectGuidance = Annotated[
    float | None, typer.Option("--subject-guidance", help="Guidance scale of the subject's pictures.")
]
Subject = Annotated[
    Path | None, typer.Option(help="Folder of 2 or more pictures of the subject; default: the embedded one.")
]
InstancePrompt = Annotated[str | None, typer.Option(help="The prompt that the subject is taught under.")]
ClassPrompt = Annotated[str | None, typer.Option(help="The prompt whose pictures preserve the prior.")]
ClassImages = Annotated[int | None, typer.Option(help="Pictures of the class, made before training.")]
OtherPrompts = Annotated[int | None, typer.Option(help="Other prompts, one picture each for each row.")]
