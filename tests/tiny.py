"""Parts of tiny Stable Diffusion pipelines, built from configs with random weights."""

import json
from functools import partial

import numpy as np
import torch
from diffusers import (
    AutoencoderKL,
    ControlNetModel,
    MotionAdapter,
    PNDMScheduler,
    T2IAdapter,
    UNet2DConditionModel,
)
from PIL import Image
from transformers import (
    CLIPImageProcessorPil,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
)

BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
WIDTH = 16  # of the text encoder
TRANSFORMER = {
    "hidden_size": WIDTH,
    "projection_dim": WIDTH,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def training_sigma(timestep):
    """The noise level of a timestep in Stable Diffusion's training schedule."""
    alphas = np.cumprod(1 - np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2)
    return float(np.interp(timestep, np.arange(1000), np.sqrt(1 / alphas - 1)))


def may_skip(hook):
    """A hook that may miss calls, and see some twice."""
    marked = partial(hook)
    marked.agentsd_may_skip = True
    return marked


def kept(handle):
    """The cache entries of all runs."""
    return [entry for run in handle._hook.runs for entry in run.memories.values()]


def make_unet(**changes):
    """An SD 1.x U-Net of three levels, attention on two of them and in the middle, two heads a block."""
    settings = {
        "sample_size": 16,
        "block_out_channels": (16, 32, 32),
        "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        "layers_per_block": 1,
        "cross_attention_dim": WIDTH,
        "attention_head_dim": 2,
        "norm_num_groups": 4,
    }
    torch.manual_seed(0)
    return UNet2DConditionModel(**settings | changes).eval()


def make_small_unet(**changes):
    """One of two levels and three self-attention layers, all on the finest, which compiles sooner."""
    settings = {
        "block_out_channels": (8, 16),
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "mid_block_type": None,
    }
    return make_unet(**settings | changes)


def make_sdxl_unet(**changes):
    """An SDXL U-Net: no attention on the first level, several transformer blocks below it."""
    settings = {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2, 3),
        "use_linear_projection": True,
        "attention_head_dim": (2, 2, 4),
    }
    return make_unet(**settings | changes)


def make_controlnet():
    """A ControlNet of `make_unet`'s encoder, whose output is not zero."""
    unet = make_unet()
    torch.manual_seed(1)
    net = ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(16, 16)).eval()
    for parameter in net.controlnet_down_blocks.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return net


def make_vae(levels=2, sample_size=32):
    """An autoencoder that halves each side once less than it has levels."""
    torch.manual_seed(0)
    return AutoencoderKL(
        block_out_channels=(8,) * levels,
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        layers_per_block=1,
        norm_num_groups=4,
        sample_size=sample_size,
    ).eval()


def make_tokenizer(folder):
    """A CLIP tokenizer that spells words letter by letter; its files are written to `folder`."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,"
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(c + "</w>" for c in letters)]
    (folder / "vocab.json").write_text(json.dumps({w: i for i, w in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=20)


def make_text_encoder(tokenizer, projection=False):
    """A CLIP text encoder of width 16, with or without a projection (SDXL's second one)."""
    marks = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    config = CLIPTextConfig(vocab_size=len(tokenizer), max_position_embeddings=20, **TRANSFORMER, **marks)
    torch.manual_seed(0)
    return (CLIPTextModelWithProjection if projection else CLIPTextModel)(config).eval()


def make_image_encoder():
    torch.manual_seed(0)
    config = CLIPVisionConfig(image_size=32, patch_size=8, **TRANSFORMER)
    return CLIPVisionModelWithProjection(config).eval()


def make_image_processor():
    return CLIPImageProcessorPil(crop_size=32, size={"shortest_edge": 32})


def make_t2i_adapter():
    """A T2I-Adapter whose features fit `make_unet`."""
    torch.manual_seed(0)
    sizes = {"in_channels": 3, "channels": [16, 32, 32], "num_res_blocks": 1, "downscale_factor": 2}
    return T2IAdapter(**sizes, adapter_type="full_adapter").eval()


def make_motion_adapter():
    """An AnimateDiff motion adapter for `make_unet`."""
    torch.manual_seed(0)
    sizes = {"motion_layers_per_block": 1, "motion_norm_num_groups": 4, "motion_num_attention_heads": 2}
    return MotionAdapter(block_out_channels=(16, 32, 32), **sizes).eval()


def make_scheduler():
    """SD 1.5's scheduler."""
    return PNDMScheduler(**BETAS, skip_prk_steps=True, steps_offset=1)


PHASES = {
    "AgentsPlan": "agent",
    "PooledPlan": "agent",
    "DownsamplePlan": "downsample",
    "NoneType": "baseline",
}


def watch_phases(handle):
    """What each patched layer runs, a word for each call, filled as the model runs."""
    seen = {name: [] for name in handle.layer_names}

    def note(layer, *_):
        seen[layer.layer.name].append(PHASES[type(layer.group.plan).__name__])

    for layer in handle._layers.processors:
        layer.layer.attn.register_forward_pre_hook(may_skip(partial(note, layer)))
    return seen


INPUT_IMAGE = Image.linear_gradient("L").resize((32, 32)).convert("RGB")


def sdxl_unet(**changes):
    """An SDXL U-Net with the extra conditions on text and sizes."""
    return make_sdxl_unet(
        cross_attention_dim=2 * WIDTH,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + WIDTH,
        **changes,
    )


def sdxl_parts(tokenizer):
    """What SDXL has twice."""
    return {"tokenizer_2": tokenizer, "text_encoder_2": make_text_encoder(tokenizer, projection=True)}


def snapshot(unet):
    """Everything a patch could leave behind: classes, processors, hooks, and attributes, of every module."""
    return {
        name: (
            type(module),
            getattr(module, "processor", None),
            set(vars(module)),
            [dict(v) for k, v in vars(module).items() if k.endswith(("hooks", "hooks_with_kwargs"))],
        )
        for name, module in unet.named_modules()
    }


def call(unet, t=999, size=(16, 16), batch=2, dtype=torch.float32, device="cpu"):
    """One U-Net forward on seeded input: (batch, 4, *size)."""
    rng = torch.Generator().manual_seed(0)
    latent = torch.randn(batch, 4, *size, generator=rng).to(device, dtype)
    text = torch.randn(batch, 7, unet.config.cross_attention_dim, generator=rng).to(device, dtype)
    with torch.no_grad():
        return unet(latent, torch.tensor(t, device=device), text).sample
