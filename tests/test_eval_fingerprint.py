"""A run's folder, and a calibration's file, are of one model: all of it that images depend on."""

import copy
import json

import pytest
import torch
from agentsd_eval import calibrate
from agentsd_eval.errors import EvalError
from agentsd_eval.images.digest import parts_digest, weights_digest
from agentsd_eval.images.generate import fingerprint
from agentsd_eval.images.models import load_pipeline, scheduler_like
from agentsd_eval.images.prompts import from_prompts
from agentsd_eval.images.store import Store
from agentsd_eval.settings import RunSettings, Settings
from calibrating import COUNTED
from diffusers import DDIMScheduler, StableDiffusionXLPipeline
from tiny import BETAS, make_text_encoder, make_unet, make_vae, sdxl_parts, sdxl_unet

SETTINGS = RunSettings(steps=2, scheduler="model", fewer_steps=())


def merged(pipe):
    """The same words, and other merges: "ca" is one token where it can be."""
    tokenizer = pipe.tokenizer
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["model"]["merges"] = [["c", "a</w>"]]
    state["model"]["vocab"]["ca</w>"] = len(state["model"]["vocab"])
    other = copy.deepcopy(tokenizer)
    other._tokenizer = type(other.backend_tokenizer).from_str(json.dumps(state))
    return other


def put(pipe, name, part):
    pipe.register_modules(**{name: part})


def one_weight(pipe):
    """In the middle of the largest tensor."""
    with torch.no_grad():
        largest = max(pipe.text_encoder.parameters(), key=torch.numel)
        largest.flatten()[largest.numel() // 2] += 1e-3


def words_swapped(pipe):
    """A sum of all weights would not tell."""
    vectors = pipe.text_encoder.get_input_embeddings().weight.data
    vectors[[10, 30]] = vectors[[30, 10]]


def scheduler(**settings):
    return DDIMScheduler(**BETAS | {"clip_sample": False, "steps_offset": 1} | settings)


CHANGES = {
    "autoencoder": ("vae", lambda p: put(p, "vae", make_vae(levels=2).apply(_noisy))),
    "its scale": ("vae", lambda p: p.vae.register_to_config(scaling_factor=0.13)),
    "one weight of the text encoder": ("text_encoder", one_weight),
    "two words of it": ("text_encoder", words_swapped),
    "its activation": ("text_encoder", lambda p: setattr(p.text_encoder.config, "hidden_act", "gelu")),
    "tokenizer": ("tokenizer", lambda p: put(p, "tokenizer", merged(p))),
    "a word more": ("tokenizer", lambda p: p.tokenizer.add_tokens(["<sks>"])),
    "shorter prompts": ("tokenizer", lambda p: setattr(p.tokenizer, "model_max_length", 19)),
    "U-Net": ("unet", lambda p: p.unet.apply(_noisy)),
    "its heads": ("unet", lambda p: put(p, "unet", _with_heads(p.unet, 4))),
    "prediction": ("scheduler", lambda p: put(p, "scheduler", scheduler(prediction_type="v_prediction"))),
    "noise levels": ("scheduler", lambda p: put(p, "scheduler", scheduler(beta_end=0.02))),
    "offset": ("scheduler", lambda p: put(p, "scheduler", scheduler(steps_offset=0))),
    "sampler": ("scheduler", lambda p: put(p, "scheduler", scheduler_like(p.scheduler, "euler"))),
}


def _noisy(module):
    if isinstance(module, torch.nn.Linear):
        torch.nn.init.normal_(module.weight)


def _with_heads(unet, heads):
    other = make_unet(attention_head_dim=heads)
    other.load_state_dict(unet.state_dict())
    return other


@pytest.fixture
def model(make_pipeline):
    return make_pipeline(scheduler=scheduler())


@pytest.mark.parametrize("change", CHANGES)
def test_another_part_is_another_model(model, tmp_path, change):
    name, do = CHANGES[change]
    specs = from_prompts(["a cat"], 2, 0)
    for _ in range(2):
        Store(tmp_path).claim(fingerprint(model, specs, SETTINGS), {})
    do(model)
    with pytest.raises(EvalError, match=rf"another run's .*\({name}_digest: '\w{{16}}.* there, .* now\)"):
        Store(tmp_path).claim(fingerprint(model, specs, SETTINGS), {})


def test_a_part_that_came_or_went_is_one(model, tmp_path):
    specs, more = from_prompts(["a cat"], 1, 0), make_text_encoder(model.tokenizer)
    facts = fingerprint(model, specs, SETTINGS)
    both = facts | {"text_encoder_2_digest": weights_digest(more)}
    for name, there, now in (("came", facts, both), ("went", both, facts)):
        Store(tmp_path / name).claim(there, {})
        with pytest.raises(EvalError, match="text_encoder_2_digest: "):
            Store(tmp_path / name).claim(now, {})


def test_pipelines_have_settings_of_their_own(make_pipeline, tokenizer):
    """SDXL's empty prompt is all zeros, or encoded as any other."""
    parts = {"cls": StableDiffusionXLPipeline, "unet": sdxl_unet(), **sdxl_parts(tokenizer)}
    pipes = [make_pipeline(**parts, force_zeros_for_empty_prompt=zeros) for zeros in (True, False)]
    first, second = map(parts_digest, pipes)
    assert {name for name in first if first[name] != second[name]} == {"pipeline_digest"}
    assert {"text_encoder_2_digest", "tokenizer_2_digest", "vae_digest"} <= set(first)


def test_the_same_model_from_elsewhere_is_the_same(model_folder, tmp_path):
    """Whatever it did before: a tokenizer keeps how it last padded."""
    pipe = load_pipeline(Settings(model=model_folder))
    before = parts_digest(pipe)
    pipe.tokenizer(["a", "a cat"], padding="longest", return_tensors="pt")
    pipe(prompt="a cat", num_inference_steps=1, height=32, width=32)
    pipe.save_pretrained(tmp_path / "copy")
    again = load_pipeline(Settings(model=str(tmp_path / "copy")))
    assert parts_digest(pipe) == before == parts_digest(again)


def test_a_calibration_goes_on_with_its_own_text_encoder_alone(plain, figures, monkeypatch):
    runs, call = [], type(plain).__call__
    monkeypatch.setattr(type(plain), "__call__", lambda *a, **k: runs.append(k) or call(*a, **k))
    calibrate(plain, ["a cat"], speedup=1.3, resume=figures, **COUNTED)
    assert not runs
    plain.text_encoder.apply(_noisy)
    calibrate(plain, ["a cat"], speedup=1.3, resume=figures, **COUNTED)
    assert runs
