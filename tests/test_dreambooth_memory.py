"""The memory of a training step that is computed from shapes: against what is allocated, and by hand."""

import json
from collections import namedtuple
from itertools import accumulate

import diffusers
import pytest
import torch
from agentsd_eval.cost.architectures import SD15, autoencoder
from diffusers import UNet2DConditionModel
from dreamboothing import run_command, train
from torch.profiler import ProfilerActivity, profile
from transformers import CLIPTextConfig

from agentsd.dreambooth.counting import compute_in
from agentsd.dreambooth.memory import training_memory
from agentsd.dreambooth.training import Run

UNET, TEXT, VAE = 859_520_964, 123_060_480, 83_653_863  # weights of SD 1.5


@pytest.fixture(scope="module")
def sd15(tmp_path_factory):
    """Stable Diffusion 1.5's files of settings, and no weights."""
    folder = tmp_path_factory.mktemp("sd15")
    with torch.device("meta"):
        UNet2DConditionModel(**SD15).save_config(folder / "unet")
        autoencoder().save_config(folder / "vae")
    width = {"hidden_size": 768, "intermediate_size": 3072}
    depth = {"num_hidden_layers": 12, "num_attention_heads": 12}
    CLIPTextConfig(vocab_size=49408, **width, **depth).save_pretrained(folder / "text_encoder")
    (folder / "model_index.json").write_text("{}")
    return str(folder)


@pytest.fixture
def memory(sd15, run_config):
    """The parts of a step of Stable Diffusion 1.5 in half precision."""

    def parts(eight_bits=True, **changes):
        model = {"pretrained_model_name_or_path": sd15, "mixed_precision": "fp16"}
        return training_memory(run_config(**model | changes), eight_bits)

    return parts


def test_the_parts_of_sd15_are_those_by_hand(memory):
    found = memory(eight_bits=False)
    known = {"U-Net": 4 * UNET, "text encoder": 2 * TEXT, "VAE": 2 * VAE}
    assert {name: found[name] for name in known} == known
    assert (found["gradients"], found["moments of AdamW"]) == (4 * UNET, 8 * UNET)
    assert memory()["moments of AdamW"] == pytest.approx(2 * UNET * (1 + 4 / 256), rel=2e-3)
    ahead = memory(cache_latents=True, center_crop=True, pre_compute_text_embeddings=True)
    assert (ahead["text encoder"], ahead["VAE"]) == (0, 0)
    both = memory(train_text_encoder=True)
    assert (both["text encoder"], both["gradients"]) == (4 * TEXT, 4 * (UNET + TEXT))
    lora = memory(rank=4)
    assert lora["U-Net"] == 2 * UNET + lora["gradients"]
    # rank x (in + out) of q, k, v and out of 16 self- and 16 cross-attention layers
    widths = 5 * [320] + 5 * [640] + 6 * [1280]
    assert lora["gradients"] == 4 * 4 * sum(14 * w + 2 * 768 for w in widths)


def test_the_preset_is_near_what_an_h200_measured(memory):
    """9.35 GB (docs/benchmarks/on_a_gpu.md): what is computed is below, and by less than a twentieth."""
    total = sum(memory(gradient_checkpointing=True, resolution=512).values()) / 1e9
    assert 9.35 * 0.95 < total < 9.35


def test_layers_without_numbers_compute_as_under_autocast():
    """CUDA's multiplies in half precision, and norms in float32."""
    multiply = torch.nn.Linear(8, 8), torch.nn.Conv2d(8, 8, 1)
    norms = torch.nn.GroupNorm(2, 8), torch.nn.LayerNorm(8)
    model = torch.nn.ModuleList([*multiply, *norms]).to("meta", torch.float32)
    compute_in(torch.float16, model)
    for dtype in (torch.float16, torch.float32):
        made = [layer(torch.zeros(1, 8, 8, 8, dtype=dtype, device="meta")).dtype for layer in model]
        assert made == [torch.float16, torch.float16, torch.float32, torch.float32]


@pytest.mark.parametrize("changes", [{}, {"rank": 4}, {"apply": "none", "gradient_checkpointing": True}])
def test_activations_are_what_pytorch_allocates(run_config, tmp_path, monkeypatch, changes):
    """The peak of a batch on a CPU, from its profiler's trace, where weights and gradients are known."""
    config = run_config(train_batch_size=4, resolution=128, **changes)
    trace, loss = tmp_path / "trace.json", Run._loss

    def watched(self, models, batch):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            loss(self, models, batch).backward()
        profiler.export_chrome_trace(str(trace))
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "_loss", watched)
    with pytest.raises(KeyboardInterrupt):
        train(config)
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["name"] == "[memory]"]
    peak = max(accumulate(e["args"]["Bytes"] for e in sorted(events, key=lambda e: e["ts"])))
    found = training_memory(config, eight_bits=False)
    assert found["gradients"] + found["activations"] == pytest.approx(peak, rel=0.1)


@pytest.mark.parametrize(
    ("size", "told"),
    [
        (None, "No CUDA device is here: take one of 11 GB or more."),
        (11e9, "Card has 11.0 GB: it fits."),
        (10e9, "Card has 10.0 GB: it does not fit. What takes less: --pre_compute_text_embeddings, "),
    ],
)
def test_a_dry_run_says_whether_the_card_does(sd15, monkeypatch, size, told):
    card = namedtuple("Card", "name total_memory")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: size is not None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card("Card", size))
    words = "--dry_run --config configs/dreambooth_sd15.yaml --instance_data_dir nowhere --instance_prompt a"
    printed = run_command([*words.split(), "--pretrained_model_name_or_path", sd15])
    assert "  in all              9.15\n" in printed
    assert told in printed


def test_a_dry_run_of_something_else_is_refused(monkeypatch):
    def unreachable(*args, **kwargs):
        raise OSError("We couldn't connect to the hub")

    monkeypatch.setattr(diffusers.DiffusionPipeline, "load_config", unreachable)
    words = "--dry_run --instance_data_dir nowhere --instance_prompt a --pretrained_model_name_or_path"
    told = run_command([*words.split(), "some/model"], 2)
    assert told.startswith(
        "error: some/model can't be reached, needs `hf auth login`, or is no diffusers model"
    )
    assert told.count("\n") == 1
