"""The pipeline that is finetuned: loaded, made trainable, and saved."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusionPipeline
from diffusers.training_utils import cast_training_params
from diffusers.utils import convert_state_dict_to_kohya
from safetensors.torch import save_file
from transformers import CLIPTokenizer

from ..apply import remove_agentsd
from ..sampler import Sampler
from .config import DreamBoothConfig
from .pretrained import load_pretrained
from .step import TARGETS

LORA_LAYERS = {
    "unet": ["to_q", "to_k", "to_v", "to_out.0"],
    "text_encoder": ["q_proj", "k_proj", "v_proj", "out_proj"],
}
KOHYA = "kohya.safetensors"
DTYPES = {"no": torch.float32, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def load_source(config: DreamBoothConfig) -> Any:
    """The pipeline that is finetuned, as it came, in float32.

    Raises:
        OSError, ValueError: it can't be loaded, or is none that is trained here.
    """
    source = config.pretrained_model_name_or_path
    if source == "demo":
        from ..demo import load_pipeline

        pipe: Any = load_pipeline()
    else:
        pipe = load_pretrained(
            StableDiffusionPipeline, source, variant=config.variant, revision=config.revision
        )
    if config.tokenizer_name is not None:
        pipe.tokenizer = CLIPTokenizer.from_pretrained(config.tokenizer_name)
    kind = pipe.scheduler.config.get("prediction_type", "epsilon")
    if Sampler(pipe.scheduler, ()).is_flow:  # whose config says nothing, or what no other schedule knows
        kind = "flow_prediction"
    if kind not in TARGETS:
        raise ValueError(
            f"the model predicts {kind!r}, which is not trained here: take one of {', '.join(TARGETS)}"
        )
    check_kind(source, pipe.unet.config)
    return pipe


def check_kind(source: str, unet: Any) -> None:
    """Raise ValueError for a U-Net's config that asks for more than a latent and a prompt."""
    if unet["in_channels"] != unet["out_channels"] or unet.get("addition_embed_type"):
        raise ValueError(
            f"{source!r} is SDXL's, an inpainting or an upscaling model, which is not trained here: take "
            "Stable Diffusion 1.x or 2.x"
        )


def make_trainable(pipe: Any, config: DreamBoothConfig) -> dict[str, Any]:
    """Freeze all, and thaw what is trained; returns the trained modules by their names in the pipeline.

    What is frozen gets the run's precision, what is trained float32, which a gradient scaler needs.
    """
    dtype = DTYPES[config.precision]
    names = ["unet", "text_encoder"] if config.train_text_encoder else ["unet"]
    for name in ("vae", "text_encoder", "unet"):
        module, whole = getattr(pipe, name), name in names and config.rank is None
        module.requires_grad_(whole)
        if not whole and dtype != module.dtype:
            torch.nn.Module.to(module, dtype)  # diffusers' own warns, of nothing
    modules = {name: getattr(pipe, name).train() for name in names}
    for name, module in modules.items():
        if config.rank is not None:
            add_lora(module, LORA_LAYERS[name], config.rank, config.lora_dropout, config.seed)
        cast_training_params(module, torch.float32)
    if config.gradient_checkpointing:
        pipe.unet.enable_gradient_checkpointing()
        if config.train_text_encoder:
            pipe.text_encoder.gradient_checkpointing_enable()
    if config.enable_xformers_memory_efficient_attention:
        pipe.unet.enable_xformers_memory_efficient_attention()
    return modules


def trained_in(modules: dict[str, Any]) -> list[torch.nn.Parameter]:
    """The parameters of modules that are trained."""
    return [p for module in modules.values() for p in module.parameters() if p.requires_grad]


def add_lora(module: Any, layers: list[str], rank: int, dropout: float, seed: int) -> None:
    """LoRA layers that start as peft's "gaussian" ones do, from a generator of their own."""
    from peft import LoraConfig

    where = next(module.parameters()).device
    with torch.device("meta"):  # where nothing is drawn: the user's random state is not touched
        module.add_adapter(LoraConfig(r=rank, lora_alpha=rank, lora_dropout=dropout, target_modules=layers))
    rng = torch.Generator("cpu").manual_seed(seed)
    for name, layer in module.named_modules():
        if name.endswith((".lora_A.default", ".lora_B.default")):
            layer.to_empty(device="cpu")
            if ".lora_A." in name:
                torch.nn.init.normal_(layer.weight, std=1 / rank, generator=rng)
            else:
                torch.nn.init.zeros_(layer.weight)
            layer.to(where)


def save_model(modules: dict[str, Any], config: DreamBoothConfig, handle: Any) -> None:
    """Write the model, or LoRA weights in the forms of diffusers and of kohya, and `agentsd.json`.

    It is written beside its place, and takes it when it is whole.

    Args:
        modules: what was trained, by names; the patch is taken off.
        config: of the run.
        handle: of the patch, which attention's trained weights are saved by, if there are any.
    """
    partial = config.output_dir / ".partial-model"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    if config.attention != "agent":
        handle.save(partial)
    elif config.apply != "none":
        config.recipe.save(partial)
    remove_agentsd(modules["unet"])
    if config.rank is not None:
        _save_lora(modules, partial)
    else:
        whole = load_source(config)  # what was not trained is saved as it came, not in the run's precision
        for name, module in modules.items():
            setattr(whole, name, module)
        whole.save_pretrained(partial)
    for made in partial.iterdir():
        place = config.output_dir / made.name
        if place.is_dir():
            shutil.rmtree(place)
        made.replace(place)
    partial.rmdir()


def _save_lora(modules: dict[str, Any], folder: Path) -> None:
    from peft import get_peft_model_state_dict

    layers = {name: get_peft_model_state_dict(module) for name, module in modules.items()}
    if text := layers.get(
        "text_encoder"
    ):  # its layers' names in files, whatever transformers has for them now
        layers["text_encoder"] = {
            f"text_model.{key.removeprefix('text_model.')}": w for key, w in text.items()
        }
    by_name: dict[str, Any] = {f"{name}_lora_layers": state for name, state in layers.items()}
    StableDiffusionPipeline.save_lora_weights(folder, **by_name)
    flat = {f"{name}.{key}": w.cpu() for name, state in layers.items() for key, w in state.items()}
    kohya = convert_state_dict_to_kohya(flat)
    # diffusers has SDXL's name for the first of two text encoders.
    save_file({key.replace("lora_te1_", "lora_te_"): w for key, w in kohya.items()}, folder / KOHYA)
