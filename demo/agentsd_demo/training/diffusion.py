"""The text encoder and the U-Net, trained together on scenes."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DDPMScheduler, PNDMScheduler, UNet2DConditionModel
from diffusers.training_utils import compute_snr
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from ..scenes import Triple, random_scene, scene_caption
from .autoencoder import encode
from .config import DiffusionConfig
from .loop import compile_loss, size_at, train_loop

START, END = "<|startoftext|>", "<|endoftext|>"
EMBEDDING_SCALE = 0.1
"""Standard deviation of new tokens' embeddings. CLIP's own, 0.02, suits long training: after a few thousand
steps, words that hardly differ at the start are still one to the U-Net."""


def build_tokenizer(captions: Sequence[str], config: DiffusionConfig) -> CLIPTokenizer:
    """Return a CLIP tokenizer whose byte pairs are learnt from the captions."""
    bpe = Tokenizer(models.BPE(end_of_word_suffix="</w>", unk_token=END))
    bpe.normalizer = normalizers.Lowercase()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation(), pre_tokenizers.ByteLevel(False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        captions,
        trainers.BpeTrainer(
            vocab_size=config.vocab_size,
            initial_alphabet=sorted(alphabet),
            special_tokens=[START, END],
            end_of_word_suffix="</w>",
            show_progress=False,
        ),
    )
    learnt = json.loads(bpe.to_str())["model"]
    merges: Any = [tuple(merge) for merge in learnt["merges"]]
    return CLIPTokenizer(vocab=learnt["vocab"], merges=merges, model_max_length=config.max_tokens)


def build_text_encoder(tokenizer: CLIPTokenizer, config: DiffusionConfig) -> CLIPTextModel:
    """Return an untrained text encoder."""
    text_encoder = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=config.text_width,
            intermediate_size=4 * config.text_width,
            projection_dim=config.text_width,
            num_hidden_layers=config.text_layers,
            num_attention_heads=config.text_heads,
            max_position_embeddings=config.max_tokens,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    embeddings: Any = text_encoder.get_input_embeddings()
    nn.init.normal_(embeddings.weight, std=EMBEDDING_SCALE)
    return text_encoder


def renew_embeddings(text_encoder: CLIPTextModel, tokenizer: CLIPTokenizer, words: Sequence[str]) -> None:
    """Draw the embeddings of the words' last tokens anew."""
    embeddings: Any = text_encoder.get_input_embeddings().weight
    last = [tokenizer.encode(word, add_special_tokens=False)[-1] for word in words]
    with torch.no_grad():
        drawn = torch.randn(len(last), embeddings.shape[1], device=embeddings.device)
        embeddings[last] = EMBEDDING_SCALE * drawn


def build_unet(config: DiffusionConfig, latent_size: int) -> Any:
    """Return an untrained UNet2DConditionModel: self- and cross-attention at every level, one head each."""
    levels = len(config.channels)
    return UNet2DConditionModel(
        sample_size=latent_size,
        block_out_channels=config.channels,
        down_block_types=("CrossAttnDownBlock2D",) * levels,
        up_block_types=("CrossAttnUpBlock2D",) * levels,
        layers_per_block=config.layers,
        cross_attention_dim=config.text_width,
        attention_head_dim=1,  # diffusers takes this as the number of heads here
        norm_num_groups=8,
    )


def build_scheduler() -> Any:
    """Return SD 1.5's scheduler, but for a model that predicts the velocity."""
    return PNDMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        skip_prk_steps=True,
        set_alpha_to_one=False,
        steps_offset=1,
        prediction_type="v_prediction",
    )


def tokenize(tokenizer: CLIPTokenizer, captions: Sequence[str]) -> Tensor:
    """Return token ids (N, max_tokens), padded and cut as the pipeline does."""
    return tokenizer(list(captions), padding="max_length", truncation=True, return_tensors="pt").input_ids


def shared_suffix(styled: Tensor, styleless: Tensor) -> Tensor:
    """Return positions (2, N, L) of the tokens that captions (N, L) share with their styleless selves.

    Both captions end in the same words, at positions that differ by the style's tokens; where the styleless
    one has no counterpart left (its padding is longer), the last pair is repeated.
    """
    pairs = []
    for one, other in zip(styled.tolist(), styleless.tolist(), strict=True):
        ends = [ids.index(ids[-1]) for ids in (one, other)]  # padding repeats the end mark
        shared = 0
        while one[ends[0] - shared] == other[ends[1] - shared] and shared < min(ends):
            shared += 1
        first = [end - shared + 1 for end in ends]
        room = len(one) - max(first)
        pairs.append([[start + min(i, room - 1) for i in range(len(one))] for start in first])
    return torch.tensor(pairs).transpose(0, 1)


class DiffusionLoss(nn.Module):
    """Squared error of the velocity, weighted by min(SNR + 1, gamma) / (SNR + 1)."""

    weights: Tensor

    def __init__(self, unet: Any, text_encoder: Any, config: DiffusionConfig) -> None:
        super().__init__()
        self.unet = unet
        self.text_encoder = text_encoder
        self.noise = DDPMScheduler.from_config(build_scheduler().config)
        snr = compute_snr(self.noise, torch.arange(len(self.noise))) + 1
        self.register_buffer("weights", snr.clamp(max=config.snr_gamma) / snr, persistent=False)

    def forward(self, latents: Tensor, noise: Tensor, t: Tensor, ids: Tensor) -> Tensor:
        """Return the mean loss of latents (B, 4, h, w) at timesteps (B,) under token ids (B, L)."""
        text = self.text_encoder(ids)[0]
        velocity = self.unet(self.noise.add_noise(latents, noise, t), t, text).sample
        error = (velocity.float() - self.noise.get_velocity(latents, noise, t)).square()
        return (error.mean((1, 2, 3)) * self.weights[t]).mean()


class Captions:
    """Token ids of captions, on a device; each caption is tokenised once."""

    def __init__(self, tokenizer: CLIPTokenizer, device: torch.device) -> None:
        self._tokenizer, self._device = tokenizer, device
        self._ids: dict[str, Tensor] = {}
        self._suffixes: dict[tuple[str, str], Tensor] = {}

    def ids(self, captions: Sequence[str]) -> Tensor:
        """Return token ids (N, L)."""
        if new := [caption for caption in dict.fromkeys(captions) if caption not in self._ids]:
            self._ids.update(zip(new, tokenize(self._tokenizer, new), strict=True))
        return torch.stack([self._ids[caption] for caption in captions]).to(self._device)

    def suffix(self, styled: Sequence[str], styleless: Sequence[str]) -> Tensor:
        """Return what `shared_suffix` says of captions and their styleless selves, (2, N, L)."""
        pairs = list(zip(styled, styleless, strict=True))
        for pair in dict.fromkeys(pairs):
            if pair not in self._suffixes:
                self._suffixes[pair] = shared_suffix(*(tokenize(self._tokenizer, [one]) for one in pair))
        return torch.cat([self._suffixes[pair] for pair in pairs], 1).to(self._device)


def shifted_noise(
    shape: Sequence[int], offset: float, generator: torch.Generator, device: torch.device | str = "cpu"
) -> Tensor:
    """Return noise (B, C, H, W) whose channels have means with a standard deviation of `offset`.

    A GPU draws it itself, from the generator's seed: a batch's noise takes a CPU longer than the step.
    """
    device = torch.device(device)
    if device.type != "cpu":
        generator = torch.Generator(device).manual_seed(generator.initial_seed())
    noise = torch.randn(*shape, generator=generator, device=device)
    return noise + offset * torch.randn(*shape[:2], 1, 1, generator=generator, device=device)


def style_leak(text_encoder: Any, styled: Tensor, styleless: Tensor, suffix: Tensor) -> Tensor:
    """Return the mean squared change that a style makes to the hidden states of the words after it.

    `suffix` (2, N, L) is what `shared_suffix` says of the captions' token ids (N, L). At 0 a style speaks by
    its own tokens alone and a concept by its own, so that a pair never seen together is two inputs that were.
    """
    hidden = text_encoder(torch.cat([styled, styleless]))[0].float().unflatten(0, (2, -1))
    with_style, without = hidden.gather(2, suffix[..., None].expand(-1, -1, -1, hidden.shape[-1]))
    return (with_style - without).square().mean()


def canvas_size(config: DiffusionConfig, step: int, seed: int) -> int:
    """Return the canvas of a training step in pixels, drawn among its stage's sizes."""
    return size_at(config.stages, step / config.steps, f"canvas/{seed}/{step}")


@dataclass(frozen=True)
class SceneBatches(Dataset[tuple[list[Triple], Tensor]]):
    """The training scenes of each step, a pure function of it: what they show, and pixels (B, H, W, 3)."""

    among: Sequence[Triple]
    config: DiffusionConfig
    seed: int

    def __getitem__(self, step: int) -> tuple[list[Triple], Tensor]:
        size = canvas_size(self.config, step, self.seed)
        names = [f"train/{self.seed}/{step}/{i}" for i in range(self.config.batch)]
        scenes = [random_scene(name, size, among=self.among) for name in names]
        pixels = torch.from_numpy(np.stack([np.asarray(scene.image) for scene in scenes]))
        return [scene.triple for scene in scenes], pixels

    def ahead(self, start: int, pin: bool = False) -> Iterator[tuple[list[Triple], Tensor]]:
        """Yield the batches from a step on, composed ahead by other processes if so configured."""
        workers = self.config.workers
        steps = range(start, self.config.steps)
        prefetch = 8 if workers else None
        loader = DataLoader(
            self,
            batch_size=None,
            sampler=steps,
            num_workers=workers,
            prefetch_factor=prefetch,
            pin_memory=pin,
        )
        return iter(loader)


def train_diffusion(
    loss: DiffusionLoss,
    autoencoder: Any,
    tokenizer: CLIPTokenizer,
    among: Sequence[Triple],
    config: DiffusionConfig,
    folder: Path,
    *,
    seed: int,
    device: torch.device,
    draw: Callable[[int], None] | None = None,
) -> None:
    """Train on scenes without end that show one of `among`.

    `draw` is called with the step for a grid of images.
    """
    loss = loss.to(device)
    if config.compile:
        compile_loss(loss.unet)
    captions = Captions(tokenizer, device)
    empty = captions.ids([""])
    spread = torch.arange(config.batch) / config.batch
    source = SceneBatches(among, config, seed)
    batches: Iterator[tuple[list[Triple], Tensor]] | None = None

    def loss_at(generator: torch.Generator, step: int) -> Tensor:
        nonlocal batches
        batches = batches or source.ahead(step, pin=device.type == "cuda")
        shown, images = next(batches)
        pixels = images.to(device, non_blocking=True).permute(0, 3, 1, 2).float() / 127.5 - 1
        latents = encode(autoencoder, pixels) * autoencoder.config.scaling_factor
        noise = shifted_noise(latents.shape, config.offset_noise, generator, device)
        # Evenly spread over the schedule, so that a small batch meets every level of noise.
        t = (spread + torch.rand(config.batch, generator=generator) / config.batch) * len(loss.noise)

        share = torch.rand(config.batch, generator=generator)
        coloured = (share >= config.colour_dropout).tolist()
        parts = [
            (triple.concept, triple.style, triple.colour if kept else None)
            for triple, kept in zip(shown, coloured, strict=True)
        ]
        words = [scene_caption(*part) for part in parts]
        fewer = [scene_caption(concept, None, on) for concept, _, on in parts]
        styled, styleless, suffix = captions.ids(words), captions.ids(fewer), captions.suffix(words, fewer)
        kept = torch.rand(config.batch, 1, generator=generator).to(device) - config.caption_dropout
        prompt = torch.where(kept < config.style_dropout, styleless, styled)
        prompt = torch.where(kept < 0, empty, prompt)
        leak = style_leak(loss.text_encoder, styled, styleless, suffix)
        return loss(latents, noise, t.long().to(device), prompt) + config.leak_weight * leak

    every = (config.grid_every, draw) if draw is not None else None
    train_loop(loss, loss_at, config, folder, seed=seed, device=device, every=every)
