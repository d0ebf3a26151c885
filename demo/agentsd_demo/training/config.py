"""Settings of the recipe; a YAML file overrides the defaults, and an unknown key is an error."""

from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

from ..data import PIPELINE


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LoopConfig(_Settings):
    """How long and how fast one part is trained; `steps` or `max_minutes` ends it, whichever is first."""

    steps: int = Field(gt=0)
    max_minutes: float | None = Field(default=None, gt=0)
    """Minutes of training over all rounds; the learning rate reaches 0 when they (or the steps) are over."""
    batch: int = Field(default=8, gt=0)
    lr: float = Field(gt=0)
    warmup: int = Field(default=200, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    ema_decay: float = Field(default=0.999, ge=0, lt=1)
    compile: bool = True
    bf16: bool = True
    log_every: int = Field(default=50, gt=0)
    save_every: int = Field(default=1000, gt=0)


class Stage(_Settings):
    """Up to which share of the training, and the shares of image sizes (pixels on a side) in it."""

    until: float = Field(gt=0, le=1)
    sizes: dict[int, float]


class AutoencoderConfig(LoopConfig):
    """The AutoencoderKL: a 4x-downsampling one has three entries in `channels`."""

    steps: int = Field(default=1400, gt=0)
    batch: int = Field(default=16, gt=0)
    lr: float = Field(default=1.5e-3, gt=0)
    channels: tuple[int, ...] = (32, 32, 64)
    layers: int = Field(default=1, gt=0)
    kl_weight: float = Field(default=1e-4, ge=0)
    """Weight of the mean divergence of a latent value, beside a squared error on pixels in [-1, 1]."""
    l1_weight: float = Field(default=0.1, ge=0)
    teacher: Path | None = None
    """Folder of an exported pipeline whose latents are kept, so that its U-Net stays of use: a teacher that
    downsamples less sees the image as much smaller. What fits of its autoencoder's weights is the start."""
    latent_weight: float = Field(default=0.02, ge=0)
    """Weight of the squared distance to the teacher's latents. They leave room beside them for what only the
    larger image shows."""
    stages: tuple[Stage, ...] = (Stage(until=0.8, sizes={64: 1.0}), Stage(until=1.0, sizes={128: 1.0}))
    """Crops of scenes along the training. Small ones do for what is local; whole images come last, as the
    statistics of group norm are an image's."""
    rare: float = Field(default=0.15, ge=0, le=1)
    """Share of the scenes that show any concept, not one that the U-Net is trained on."""


class DiffusionConfig(LoopConfig):
    """The U-Net and the text encoder, trained together."""

    steps: int = Field(default=20000, gt=0)
    lr: float = Field(default=5e-4, gt=0)
    weight_decay: float = Field(default=0.01, ge=0)
    channels: tuple[int, ...] = (48, 128, 256)
    layers: int = Field(default=1, gt=0)
    text_width: int = Field(default=128, gt=0)
    text_layers: int = Field(default=3, gt=0)
    text_heads: int = Field(default=4, gt=0)
    vocab_size: int = Field(default=2500, gt=514)
    max_tokens: int = Field(default=16, gt=2)
    stages: tuple[Stage, ...] = (
        Stage(until=0.5, sizes={128: 1.0}),
        Stage(until=1.0, sizes={128: 0.5, 192: 0.25, 256: 0.25}),
    )
    """Canvas sizes along the training; small ones come first, as they are cheap."""
    caption_dropout: float = Field(default=0.1, ge=0, lt=1)
    style_dropout: float = Field(default=0.1, ge=0, lt=1)
    """Share of the captions whose style is left out, so that a concept is learnt apart from its style."""
    colour_dropout: float = Field(default=0.05, ge=0, lt=1)
    """Share of the captions whose background is left out."""
    leak_weight: float = Field(default=0.1, ge=0)
    """Weight of the squared change that a style makes to the text encoder's hidden states of a concept."""
    snr_gamma: float = Field(default=5.0, gt=0)
    offset_noise: float = Field(default=0.15, ge=0)
    """Standard deviation of a shift of each channel's noise. The mean of a latent shows through SD 1.5's last
    level of noise; without a shift the background is read there and its word is not learnt."""
    workers: int = Field(default=0, ge=0)
    """Processes that compose scenes ahead; a GPU is kept busy by a dozen, a CPU has no use for any."""
    grid_every: int = Field(default=2000, gt=0)
    """Steps between grids of images."""


class DemoConfig(_Settings):
    """The whole recipe."""

    run_dir: Path = Path("runs/demo")
    """Checkpoints, logs and grids of images; a second run with the same folder resumes."""
    export_dir: Path = PIPELINE
    init_from: Path | None = None
    """Folder of an exported pipeline whose weights a new run starts from; its shapes are kept."""
    fresh_words: tuple[str, ...] = ()
    """Words that the start doesn't tell apart: the embeddings of their last tokens are drawn anew."""
    concepts: Literal["all"] | tuple[str, ...] = "all"
    """What the U-Net is trained on; the autoencoder sees the others too."""
    device: str = "cpu"
    seed: int = 0
    autoencoder: AutoencoderConfig | None = AutoencoderConfig()
    """None keeps the start's."""
    diffusion: DiffusionConfig = DiffusionConfig()


def load_config(path: Path) -> DemoConfig:
    """Read a YAML recipe; an unknown key or a bad value raises pydantic's ValidationError naming it."""
    return DemoConfig.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")) or {})
