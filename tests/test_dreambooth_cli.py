"""The commands of DreamBooth: what diffusers' words start, and what is said of settings that are refused."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from dreamboothing import run_command
from hub import stand_in

from agentsd.dreambooth.cli import dreambooth, dreambooth_lora
from agentsd.dreambooth.config import DreamBoothConfig

PRIOR = ["--with_prior_preservation", "--class_prompt", "a cat", "--class_data_dir"]
LATER = ["--output_dir", "LATER", "--resume_from_checkpoint"]

BAD = [
    (["--instance_data_dir", "nowhere"], "nowhere is not a folder"),
    (["--instance_data_dir", "BROKEN"], "broken.png cannot be read"),
    (["--instance_data_dir", "EMPTY"], "EMPTY has no image (.bmp, .jpeg, .jpg, .png, .webp); 3 to 6 views"),
    (["--resolution", "33"], "--resolution = 33: pass a multiple of 8"),
    (["--scale", "0.54"], "--scale = 0.54: pass 0.0 or less"),
    (["--lr_scheduler", "cosin"], "--lr_scheduler = cosin: did you mean cosine? choose linear"),
    (["--mixed_precision", "fp16"], "mixed_precision='fp16' needs a CUDA device: pass 'bf16' or 'no'"),
    (["--use_8bit_adam"], "use_8bit_adam needs a CUDA device, this is cpu: pass --no_use_8bit_adam"),
    (["--with_prior_preservation"], "needs class_data_dir"),
    ([*PRIOR, "BROKEN"], "broken.png cannot be read"),
    ([*PRIOR, "BROKEN/broken.png"], "is no folder: choose another"),
    (["--class_data_dir", "LINK"], "is the subject's: choose another"),
    (["--resume_from_checkpoint", "checkpoint-7"], "there: none"),
    ([*LATER, "checkpoint-7"], "; there: checkpoint-9, checkpoint-20, checkpoint-100; "),
    ([*LATER, "checkpoint-20"], "'checkpoint-20': the run would overwrite checkpoint-100 in"),
    (["--rank", "4", "--attention", "module"], "attention='module' is trained: leave out rank and apply"),
    (["--cache_latents"], "cache_latents encodes each image once: add center_crop"),
    (["--pre_compute_text_embeddings", "--train_text_encoder"], "leave out pre_compute_text_embeddings"),
    (["--report_to", "wandb"], "wandb is not installed; install it, or pass --report_to none"),
    (["--report_to", "paper"], "report_to='paper' is none of aim, comet_ml"),
    (["--enable_xformers_memory_efficient_attention"], "xformers is not installed; leave it out"),
    (["--pretrained_model_name_or_path", "EMPTY"], "EMPTY: it has no model_index.json; give the folder of"),
    (
        ["--pretrained_model_name_or_path", "/no/such"],
        "/no/such: there is no such folder, and it is no hub id (OWNER/NAME); 'demo' is the toy model",
    ),
    (
        ["--pretrained_model_name_or_path", "demoo", "--dry_run"],
        "= demoo: there is no such folder, and",
    ),
    (["--ratio", "1"], "--ratio = 1: pass 0.9375 or less"),
    (["--local_rank", "0"], "--local_rank is not accepted: use accelerate launch (see "),
    (["--output_dir", "BROKEN"], "holds broken.png, which the run might overwrite: choose another folder"),
    (["--output_dir", "BROKEN/broken.png"], "broken.png is a file; name a folder"),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_input_is_told_before_anything_is_done(options, message, photographs, tmp_path, monkeypatch):
    monkeypatch.setattr("agentsd.dreambooth.training.load_source", None)
    for name in ("BROKEN", "EMPTY", *(f"LATER/checkpoint-{step}" for step in (20, 100, 9))):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "BROKEN" / "broken.png").write_bytes(b"no image")
    (tmp_path / "LINK").symlink_to(photographs)
    before = {*tmp_path.rglob("*")}
    options = [str(tmp_path / o) if (tmp_path / o).exists() else o for o in options]
    base = ["--pretrained_model_name_or_path", "no/model", "--instance_prompt", "a sks cat"]
    base += ["--instance_data_dir", str(photographs), "--output_dir", str(tmp_path / "out")]
    told = run_command(base + options, 2).strip()
    assert message in told
    assert told.startswith("error: ")
    assert "\n" not in told
    assert len(told) < 1000
    assert {*tmp_path.rglob("*")} == before


def test_ctrl_c_says_what_is_kept(photographs, tmp_path, monkeypatch):
    def interrupted(run):
        raise KeyboardInterrupt

    monkeypatch.setattr("agentsd.dreambooth.training.Run.train", interrupted)
    options = ["--pretrained_model_name_or_path", "no/model", "--instance_prompt", "a sks cat"]
    options += ["--instance_data_dir", str(photographs), "--output_dir", str(tmp_path)]
    latest = ["--report_to", "none", "--resume_from_checkpoint", "latest"]
    printed = run_command(options + latest, 130)
    assert f"{tmp_path}: no checkpoint: beginning at step 0\n" in printed
    assert "stopped before the first checkpoint, so nothing is kept" in printed
    (tmp_path / "checkpoint-20").mkdir()
    monkeypatch.setattr("agentsd.dreambooth.training.check_settings", lambda *args: None)
    printed = run_command(options + latest, 130)
    assert f"{tmp_path}: going on from checkpoint-20\n" in printed
    assert f"with --resume_from_checkpoint latest it goes on from {tmp_path / 'checkpoint-20'}\n" in printed


def test_every_option_has_words():
    for setting in DreamBoothConfig.model_fields.values():
        assert len(str(setting.description)) > 10
        assert setting.description.endswith((".", '".'))


# From the READMEs of diffusers' examples/dreambooth, SD 1.5's part: its longest command of each script.
FOREIGN = {
    "train_dreambooth.py": """--pretrained_model_name_or_path={MODEL} --train_text_encoder
        --instance_data_dir={SUBJECT} --class_data_dir={CLASS} --output_dir={OUT} --with_prior_preservation
        --prior_loss_weight=1.0 --instance_prompt="a photo of sks dog" --class_prompt="a photo of dog"
        --resolution=32 --train_batch_size=1 --gradient_accumulation_steps=1 --gradient_checkpointing
        --set_grads_to_none --learning_rate=2e-6 --lr_scheduler="constant" --lr_warmup_steps=0
        --num_class_images=2 --max_train_steps=2 --sample_batch_size=2 --snr_gamma=5.0 --offset_noise
        --adam_beta1=0.9 --adam_weight_decay=1e-2 --lr_num_cycles=1 --lr_power=1.0 --revision=main
        --dataloader_num_workers=0 --allow_tf32 --center_crop --scale_lr --seed=1
        --prior_generation_precision=fp32""",
    "train_dreambooth_lora.py": """--pretrained_model_name_or_path={MODEL} --instance_data_dir={SUBJECT}
        --output_dir={OUT} --instance_prompt="a photo of sks dog" --resolution=32 --train_batch_size=1
        --gradient_accumulation_steps=1 --checkpointing_steps=100 --learning_rate=1e-4
        --report_to="tensorboard" --lr_scheduler="constant" --lr_warmup_steps=0 --max_train_steps=2
        --validation_prompt="A photo of sks dog in a bucket" --validation_epochs=50 --seed="0"
        --push_to_hub""",
}


@pytest.fixture
def foreign(model_folder, photographs, tmp_path):
    """The words after each script's name; images are drawn in few steps here, which is not the command's."""
    places = {"MODEL": model_folder, "SUBJECT": photographs, "OUT": tmp_path / "out"}
    places["CLASS"] = tmp_path / "class"
    few = ["--num_inference_steps", "1", "--num_validation_images", "1"]
    return {script: [*shlex.split(told.format(**places)), *few] for script, told in FOREIGN.items()}


def assert_made(out, script):
    model = "kohya.safetensors" if "lora" in script else "unet"
    assert {path.name for path in out.iterdir()} >= {"grid.png", "agentsd.json", model}


@pytest.mark.parametrize("script", FOREIGN)
def test_a_command_of_diffusers_runs_after_its_first_word(script, foreign, tmp_path, monkeypatch):
    stand_in(monkeypatch)
    monkeypatch.setattr("agentsd.dreambooth.training.torch.set_float32_matmul_precision", lambda _: None)
    command, out = dreambooth_lora if "lora" in script else dreambooth, tmp_path / "out"
    printed = run_command(foreign[script], command=command)
    assert "9 images of the subject\n" in printed
    assert f"saved to {out}; grid.png and checkpoints are beside it\n" in printed
    assert_made(out, script)


@pytest.mark.slow
@pytest.mark.parametrize("script", FOREIGN)
def test_a_command_of_diffusers_runs_from_its_first_word(script, foreign, tmp_path):
    """`accelerate launch SCRIPT`, with the module that the tutorial names in place of the script."""
    module = "agentsd.dreambooth.lora" if "lora" in script else "agentsd.dreambooth"
    assert f"`accelerate launch -m {module}`" in Path("docs/tutorials/dreambooth.md").read_text()
    words = [word for word in foreign[script] if word != "--push_to_hub"]
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "-m", module]
    subprocess.run([*launch, *words], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert_made(tmp_path / "out", script)


MISSING = (
    "--pretrained_model_name_or_path, --instance_data_dir, --instance_prompt missing: give each as an option"
)


def test_what_is_missing_is_told_as_options():
    assert run_command([], 2) == f"error: {MISSING}, or as lines of a YAML file, with --config\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"ratio: [1\n", "is not valid YAML: line 2, column 1: expected ',' or ']'"),
        (b"- ratio\n", "holds a list: write `name: value` lines"),
        (b"", f"error: {MISSING}, or as lines of FILE\n"),
        (b"ratio: \xff\n", "FILE is not UTF-8 text (byte 7): save it as UTF-8"),
        (b"a: &a [1, 1]\nb: [*a, *a]\n", "line 2, column 5: aliases (*name) are not read: write it out"),
        (b"[" * 5000, "FILE is nested too deeply"),
        (b"#" * 1_000_001, "FILE is larger than 1,000,000 bytes"),
        (b"ratio: x\n", "FILE: ratio = 'x': pass a number"),
        (b"max_steps: 3\n", "FILE: unknown key 'max_steps'; did you mean 'max_train_steps'?"),
        (None, "error: FILE: No such file or directory; name another\n"),
    ],
)
def test_a_bad_file_of_settings_is_told_in_a_line(content, message, tmp_path):
    path = tmp_path / "run.yaml"
    if content is not None:
        path.write_bytes(content)
    printed = run_command(["--config", str(path)], 2).replace(str(path), "FILE")
    assert message in printed
    assert all(line.startswith("error: ") for line in printed.splitlines())
    assert len(printed) < 500
