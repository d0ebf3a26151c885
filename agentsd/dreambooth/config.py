"""Settings of a DreamBooth run: names of diffusers' own scripts, defaults of the paper (appendix B.4)."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

if TYPE_CHECKING:
    from ..attention import Operator
    from ..recipe import Recipe

Apply = Literal["train+generate", "generate", "none"]
Precision = Literal["no", "fp16", "bf16"]
Schedule = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup"
]

CONSTANT = ("constant", "constant_with_warmup")
"""Schedules that do not depend on how long the run is."""

MAY_CHANGE = """
    output_dir instance_data_dir class_data_dir scale_lr num_train_epochs gradient_checkpointing
    enable_xformers_memory_efficient_attention set_grads_to_none pre_compute_text_embeddings
    dataloader_num_workers checkpointing_steps checkpoints_total_limit resume_from_checkpoint
    sample_batch_size prior_generation_precision validation_prompt validation_steps
    validation_epochs num_validation_images num_inference_steps guidance_scale logging_dir report_to
    push_to_hub hub_model_id
""".split()  # noqa: SIM905
"""What a resumed run may have otherwise than the run it goes on with: the next step is the same.

The images themselves are compared, and not where they lie.
"""


def check_model(name: str) -> str:
    """Return the name of a model: the toy model's, a folder, or a hub id; raises ValueError for another."""
    if name != "demo" and not Path(name).is_dir() and not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        raise ValueError("there is no such folder, and it is no hub id (OWNER/NAME); 'demo' is the toy model")
    return name


def check_pipeline(name: str) -> str:
    """Return the name of a pipeline; raises ValueError for a folder that holds none."""
    if name != "demo" and Path(name).is_dir() and not (Path(name) / "model_index.json").is_file():
        raise ValueError("it has no model_index.json; give the folder of a diffusers pipeline")
    return name


def check_folder(path: Path) -> Path:
    """Return the path of a folder; raises ValueError where a file is in its place, or in that of a parent."""
    nearest = next(place for place in (path, *path.parents) if place.exists())
    if not nearest.is_dir():
        raise ValueError(f"{nearest} is a file; name a folder")
    return path


class DreamBoothConfig(BaseModel):
    """One run. An unknown key, a wrong type or a value out of range raises pydantic's ValidationError."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    pretrained_model_name_or_path: Annotated[str, AfterValidator(check_model), AfterValidator(check_pipeline)]
    """Stable Diffusion 1.x or 2.x: a folder, a hub id, or "demo" for the bundled toy model."""
    revision: str | None = None
    """Branch, tag or commit of the model on the hub."""
    variant: str | None = None
    """Kind of the model's weight files, such as "fp16"; by default whichever there are."""
    tokenizer_name: str | None = None
    """Folder or hub id of another tokenizer."""
    instance_data_dir: Path
    """Folder of the subject's images; 3 to 6 are usual."""
    instance_prompt: str
    """Prompt of the subject's images, with a rare word for it: "a photo of sks dog"."""
    class_data_dir: Path | None = None
    """Folder of images of the subject's class, for prior preservation."""
    class_prompt: str | None = None
    """Prompt of the class images: "a photo of a dog"."""
    with_prior_preservation: bool = False
    """Train on class images as well, so that other members of the class stay as they are."""
    prior_loss_weight: float = Field(1.0, ge=0)
    """Weight of the class images' loss."""
    num_class_images: int = Field(200, ge=1)
    """Class images to train on; missing ones are drawn by the model itself before training."""
    sample_batch_size: int = Field(4, ge=1)
    """Class images that are drawn at once."""
    prior_generation_precision: Literal["no", "fp32", "fp16", "bf16"] | None = None
    """Precision in which class images are drawn; by default that of training."""
    output_dir: Annotated[Path, AfterValidator(check_folder)] = Path("dreambooth-model")
    """An empty or new folder; the model, checkpoints and images go there."""
    resolution: int | None = Field(None, ge=8, multiple_of=8)
    """Pixels on a side; by default the model's own."""
    center_crop: bool = False
    """Cut the centre out of each image, and not another square at each step."""
    train_text_encoder: bool = False
    """Train the text encoder as well."""
    rank: int | None = Field(None, ge=1)
    """Train LoRA weights of this rank in place of the model's own."""
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    """Probability of dropout in LoRA layers."""
    train_batch_size: int = Field(1, ge=1)
    """Images of the subject in a batch, on each device."""
    num_train_epochs: int | None = Field(None, ge=1)
    """Passes over the images, where max_train_steps is not given."""
    max_train_steps: int | None = Field(None, ge=1)
    """Steps of the optimizer; 800 where num_train_epochs is not given either."""
    gradient_accumulation_steps: int = Field(1, ge=1)
    """Batches in a step of the optimizer."""
    gradient_checkpointing: bool = False
    """Compute activations twice in place of keeping them: less memory, about a third slower."""
    cache_latents: bool = False
    """Encode each image once, before training, and move the VAE off the device; needs center_crop."""
    pre_compute_text_embeddings: bool = False
    """Encode the prompts once, before training, and move the text encoder off the device."""
    learning_rate: float | None = Field(None, gt=0)
    """Learning rate; by default 1e-6, the paper's, and with rank 1e-4."""
    scale_lr: bool = False
    """Multiply the learning rate by the batch size, gradient_accumulation_steps and the number of devices."""
    lr_scheduler: Schedule = "constant"
    """Course of the learning rate: linear, cosine, cosine_with_restarts, polynomial, constant or
    constant_with_warmup."""
    lr_warmup_steps: int = Field(0, ge=0)
    """Steps in which the learning rate rises from 0; "constant" has none."""
    lr_num_cycles: int = Field(1, ge=1)
    """Restarts of "cosine_with_restarts"."""
    lr_power: float = Field(1.0, gt=0)
    """Exponent of "polynomial"."""
    use_8bit_adam: bool | None = None
    """AdamW of bitsandbytes, whose moments take a quarter of the memory; by default on CUDA devices."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """Adam's decay of the mean of gradients."""
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    """Adam's decay of the mean of squared gradients."""
    adam_weight_decay: float = Field(0.01, ge=0)
    """Weight decay of AdamW."""
    adam_epsilon: float = Field(1e-8, gt=0)
    """Added to the denominator of Adam's step."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients of a larger norm are scaled down to it."""
    set_grads_to_none: bool = True
    """Free gradients after a step, and not set them to zero."""
    snr_gamma: float | None = Field(None, gt=0)
    """Weigh timesteps by Min-SNR (Hang and others 2023); 5 is usual."""
    offset_noise: bool = False
    """Add a tenth of one normal number for each channel to the noise: darker and brighter images."""
    mixed_precision: Precision | None = None
    """Precision of training; by default "no", unless `accelerate launch` says otherwise."""
    allow_tf32: bool = False
    """Faster float32 products, less exact, on NVIDIA cards since Ampere."""
    enable_xformers_memory_efficient_attention: bool = False
    """Attention by xFormers in layers without agents; PyTorch's own needs no more memory."""
    dataloader_num_workers: int = Field(0, ge=0)
    """Processes that read images; 0 reads them in the training process."""
    seed: int = Field(0, ge=0)
    """Seed of noise, timesteps, crops and images."""
    checkpointing_steps: int = Field(200, ge=1)
    """Steps from a checkpoint to the next; the last step has one, too."""
    checkpoints_total_limit: int = Field(2, ge=0)
    """How many checkpoints are kept; 0 keeps all."""
    resume_from_checkpoint: str | None = None
    """Go on from a checkpoint in the output folder: its name or path, or "latest", which begins at step 0 if
    there is none."""
    validation_prompt: str | None = None
    """Prompt of the images that are drawn while training goes on."""
    validation_steps: int = Field(200, ge=1)
    """Steps from one validation to the next."""
    validation_epochs: int | None = Field(None, ge=1)
    """Passes over the images from one validation to the next, in place of validation_steps."""
    num_validation_images: int = Field(4, ge=1)
    """Images in a validation, and in the grid at the end."""
    num_inference_steps: int = Field(100, ge=1)
    """DDIM steps of every image that a run draws."""
    guidance_scale: float = Field(7.5, ge=0)
    """Guidance of every image that a run draws."""
    logging_dir: Path = Path("logs")
    """Where trackers write, in the output folder."""
    report_to: str | None = "tensorboard"
    """A tracker of accelerate's ("wandb", "comet_ml", ...), "all", or "none"."""
    push_to_hub: bool = False
    """Upload the trained model to the Hugging Face hub."""
    hub_token: str | None = Field(None, exclude=True, repr=False)
    """Token for push_to_hub; by default the one of `hf auth login`. It is written nowhere."""
    hub_model_id: str | None = None
    """Name of the model on the hub; by default the output folder's."""
    ratio: float = Field(0.4, ge=0, le=0.9375)
    """Share of the tokens that agents merge; 0 merges none."""
    k: float = Field(0.075, ge=0, le=1000)
    """Weight of the residual `+ kV` (equation 9)."""
    scale: float = Field(-0.15, le=0)
    """Exponent of the head width in the second softmax; the usual attention has -0.5."""
    apply: Apply = "train+generate"
    """Where agent attention runs: train+generate, generate (in the images that a run draws) or none."""
    attention: Literal["agent", "module", "focused", "attnzero"] = "agent"
    """Kind of attention: agent, or module, focused or attnzero, which are trained with the U-Net."""

    @model_validator(mode="after")
    def _together(self) -> DreamBoothConfig:
        if self.with_prior_preservation and not (self.class_data_dir and self.class_prompt):
            raise ValueError("with_prior_preservation needs class_data_dir and class_prompt")
        if self.class_data_dir and self.class_data_dir.resolve() == self.instance_data_dir.resolve():
            raise ValueError(f"class_data_dir={str(self.class_data_dir)!r} is the subject's: choose another")
        if self.train_text_encoder and self.pre_compute_text_embeddings:
            raise ValueError(
                "train_text_encoder changes the embeddings: leave out pre_compute_text_embeddings"
            )
        if self.cache_latents and not self.center_crop:
            raise ValueError("cache_latents encodes each image once: add center_crop")
        if self.attention != "agent" and (self.rank is not None or self.apply != "train+generate"):
            raise ValueError(f"attention={self.attention!r} is trained: leave out rank and apply")
        self.recipe  # noqa: B018  (its own checks)
        return self

    @property
    def recipe(self) -> Recipe:
        """Attention in all steps."""
        from ..attention import Agents  # these load torch, which --help and a wrong option have no use for
        from ..modules import AgentModule, AttnZero, FocusedLinear
        from ..recipe import Recipe

        formula = {"k": self.k, "scale": self.scale}
        own = {"at_most": None, "agent_ratio": 0.95, "ranking": "layer"}  # as the paper trains
        operators: dict[str, Callable[[], Operator]] = {
            "agent": lambda: Agents(self.ratio, **formula, **own),  # type: ignore[arg-type]
            "module": lambda: AgentModule(**formula),  # type: ignore[arg-type]
            "focused": FocusedLinear,
            "attnzero": AttnZero,
        }
        return Recipe(operators[self.attention](), levels=1)

    @property
    def precision(self) -> str:
        """That of the U-Net's arithmetic: "no", "fp16" or "bf16"."""
        return self.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")

    def rate(self, processes: int) -> float:
        """The learning rate on so many devices."""
        rate = self.learning_rate or (1e-6 if self.rank is None else 1e-4)
        batch = self.train_batch_size * self.gradient_accumulation_steps * processes
        return rate * batch if self.scale_lr else rate

    def steps(self, images: int, processes: int) -> int:
        """Steps of the optimizer, where so many images are a pass."""
        if self.max_train_steps is None and self.num_train_epochs is not None:
            return self.num_train_epochs * self.epoch(images, processes)
        return self.max_train_steps or 800

    def epoch(self, images: int, processes: int) -> int:
        """Steps of the optimizer in a pass over so many images, as diffusers counts them."""
        batches = -(-images // (self.train_batch_size * processes))
        return -(-batches // self.gradient_accumulation_steps)


class LoraConfig(DreamBoothConfig):
    """A run of `agentsd-dreambooth-lora`."""

    rank: int | None = Field(4, ge=1)
