"""What the command of DreamBooth says of settings that it refuses."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from click.testing import CliRunner
from hub import stand_in

from agentsd.dreambooth.cli import dreambooth, dreambooth_lora
from agentsd.dreambooth.config import DreamBoothConfig

PRIOR = ["--with_prior_preservation", "--class_prompt", "a cat", "--class_data_dir"]

BAD = [
    (["--instance_data_dir", "nowhere"], "nowhere is not a folder"),
    (["--instance_data_dir", "BROKEN"], "broken.png cannot be read"),
    (
        ["--instance_data_dir", "EMPTY"],
        "EMPTY has no image (.bmp, .jpeg, .jpg, .png, .webp); 3 to 6 views are usual",
    ),
    (["--resolution", "33"], "--resolution = 33: pass a multiple of 8"),
    (["--scale", "0.54"], "scale=0.54"),
    (
        ["--lr_scheduler", "cosin"],
        "--lr_scheduler = cosin: did you mean cosine? choose linear",
    ),
    (["--mixed_precision", "fp16"], "mixed_precision='fp16' needs a CUDA device: pass 'bf16' or 'no'"),
    (["--use_8bit_adam"], "use_8bit_adam needs a CUDA device, this is cpu: pass --no_use_8bit_adam"),
    (["--with_prior_preservation"], "needs class_data_dir"),
    ([*PRIOR, "BROKEN"], "broken.png cannot be read"),
    ([*PRIOR, "BROKEN/broken.png"], "is no folder: choose another"),
    (["--class_data_dir", "SUBJECT"], "is the subject's: choose another"),
    (["--resume_from_checkpoint", "checkpoint-7"], "there: none"),
    (["--rank", "4", "--attention", "module"], "attention='module' is trained: leave out rank and apply"),
    (["--cache_latents"], "cache_latents encodes each image once: add center_crop"),
    (["--pre_compute_text_embeddings", "--train_text_encoder"], "leave out pre_compute_text_embeddings"),
    (
        ["--report_to", "wandb"],
        "report_to='wandb': wandb is not installed; install it, or pass --report_to none",
    ),
    (["--report_to", "paper"], "report_to='paper' is none of aim, comet_ml"),
    (["--enable_xformers_memory_efficient_attention"], "xformers is not installed; leave it out"),
    (["--pretrained_model_name_or_path", "EMPTY"], "EMPTY has no model_index.json: give the folder of"),
    (["--output_dir", "BROKEN"], "holds broken.png, which the run might overwrite: choose another folder"),
    (["--output_dir", "BROKEN/broken.png"], "File exists"),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_input_is_told_in_a_line_before_anything_is_loaded(
    options, message, photographs, tmp_path, monkeypatch
):
    monkeypatch.setattr("agentsd.dreambooth.training.load_source", None)
    AcceleratorState._reset_state(reset_partial_state=True)
    for name in ("BROKEN", "EMPTY"):
        (tmp_path / name).mkdir()
    (tmp_path / "BROKEN" / "broken.png").write_bytes(b"no image")
    options = [str(tmp_path / o) if (tmp_path / o).exists() else o for o in options]
    options = [str(photographs) if o == "SUBJECT" else o for o in options]
    base = ["--pretrained_model_name_or_path", "no/model", "--instance_prompt", "a sks cat"]
    base += ["--instance_data_dir", str(photographs), "--output_dir", str(tmp_path / "out")]
    told = told_by(base + options)
    assert message in told
    assert told.strip().startswith("error: ")
    assert "\n" not in told.strip()
    assert len(told) < 1000


def test_every_option_has_words():
    for setting in DreamBoothConfig.model_fields.values():
        assert len(str(setting.description)) > 10
        assert setting.description.endswith((".", '".'))


# From the READMEs of diffusers' examples/dreambooth, SD 1.5's part, with MODEL and folders put in.
FOREIGN = {
    "train_dreambooth.py": """--pretrained_model_name_or_path=MODEL --instance_data_dir=SUBJECT
        --output_dir=OUT --instance_prompt="a photo of sks dog" --resolution=32 --train_batch_size=1
        --gradient_accumulation_steps=1 --learning_rate=5e-6 --lr_scheduler="constant" --lr_warmup_steps=0
        --max_train_steps=2 --push_to_hub""",
    "train_dreambooth.py, prior": """--pretrained_model_name_or_path=MODEL --train_text_encoder
        --instance_data_dir=SUBJECT --class_data_dir=CLASS --output_dir=OUT --with_prior_preservation
        --prior_loss_weight=1.0 --instance_prompt="a photo of sks dog" --class_prompt="a photo of dog"
        --resolution=32 --train_batch_size=1 --gradient_accumulation_steps=1 --gradient_checkpointing
        --set_grads_to_none --learning_rate=2e-6 --lr_scheduler="constant" --lr_warmup_steps=0
        --num_class_images=2 --max_train_steps=2 --sample_batch_size=2 --snr_gamma=5.0 --offset_noise
        --adam_beta1=0.9 --adam_weight_decay=1e-2 --lr_num_cycles=1 --lr_power=1.0 --revision=main
        --dataloader_num_workers=0 --allow_tf32 --center_crop --scale_lr --seed=1
        --prior_generation_precision=fp32""",
    "train_dreambooth_lora.py": """--pretrained_model_name_or_path=MODEL --instance_data_dir=SUBJECT
        --output_dir=OUT --instance_prompt="a photo of sks dog" --resolution=32 --train_batch_size=1
        --gradient_accumulation_steps=1 --checkpointing_steps=100 --learning_rate=1e-4
        --report_to="tensorboard" --lr_scheduler="constant" --lr_warmup_steps=0 --max_train_steps=2
        --validation_prompt="A photo of sks dog in a bucket" --validation_epochs=50 --seed="0"
        --push_to_hub""",
}


@pytest.fixture
def words_of(model_folder, photographs, tmp_path):
    """The words after a script's name; images are drawn in few steps here, which is not the command's."""

    def words(script):
        told, out = FOREIGN[script], tmp_path / "out"
        places = {"MODEL": model_folder, "SUBJECT": photographs, "OUT": out, "CLASS": tmp_path / "class"}
        for name, place in places.items():
            told = told.replace(f"={name}", f"={place}")
        return [*shlex.split(told), "--num_inference_steps", "1", "--num_validation_images", "1"], out

    return words


@pytest.mark.parametrize("script", FOREIGN)
def test_a_command_of_diffusers_runs_after_its_first_word(script, words_of, photographs, monkeypatch):
    AcceleratorState._reset_state(reset_partial_state=True)
    stand_in(monkeypatch)
    monkeypatch.setattr("agentsd.dreambooth.training.torch.set_float32_matmul_precision", lambda _: None)
    words, out = words_of(script)
    result = CliRunner().invoke(dreambooth_lora if "lora" in script else dreambooth, words)
    assert result.exit_code == 0, result.output
    assert "9 images of the subject\n" in result.output
    assert f"saved to {out}; grid.png and checkpoints are beside it\n" in result.output
    assert {path.name for path in out.iterdir()} >= {"grid.png", "agentsd.json", *made_by(script)}


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train_dreambooth.py", "train_dreambooth_lora.py"])
def test_a_command_of_diffusers_runs_from_its_first_word(script, words_of):
    """`accelerate launch SCRIPT`, with the module that the tutorial names in place of the script."""
    module = "agentsd.dreambooth.lora" if "lora" in script else "agentsd.dreambooth"
    assert f"`accelerate launch -m {module}`" in Path("docs/tutorials/dreambooth.md").read_text()
    words, out = words_of(script)
    words.remove("--push_to_hub")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "-m", module]
    subprocess.run([*launch, *words], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert {path.name for path in out.iterdir()} >= {"grid.png", "agentsd.json", *made_by(script)}


def made_by(script):
    return {"kohya.safetensors"} if "lora" in script else {"unet"}


def run(options, code):
    """What the command prints."""
    result = CliRunner().invoke(dreambooth, options)
    assert result.exit_code == code, (result.output, result.exception)
    assert code == 0 or isinstance(result.exception, SystemExit)
    return result.output


def told_by(options):
    """What the command says of input it refuses."""
    return run(options, 2)


def test_resuming_from_an_earlier_checkpoint_overwrites_no_later_one(photographs, tmp_path):
    for step in (20, 100, 9):
        (tmp_path / f"checkpoint-{step}").mkdir()
    base = ["--pretrained_model_name_or_path", "no/model", "--instance_prompt", "a sks cat"]
    base += ["--instance_data_dir", str(photographs), "--output_dir", str(tmp_path)]
    told = told_by([*base, "--resume_from_checkpoint", "checkpoint-20"])
    assert "'checkpoint-20': the run would overwrite checkpoint-100 in" in told
    assert len(list(tmp_path.glob("checkpoint-*"))) == 3


MISSING = (
    "--pretrained_model_name_or_path, --instance_data_dir, --instance_prompt missing: give each as an option"
)
BOMB = "a: &a [1, 1]\nb: [*a, *a]\n"


def test_what_is_missing_is_told_as_options():
    assert told_by([]) == f"error: {MISSING}, or as lines of a YAML file, with --config\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"ratio: [1\n", "is not valid YAML: line 2, column 1: expected ',' or ']'"),
        (b"- ratio\n", "holds a list: write `name: value` lines"),
        (b"", f"error: {MISSING}, or as lines of FILE\n"),
        (b"ratio: \xff\n", "FILE is not UTF-8 text (byte 7): save it as UTF-8"),
        (
            BOMB.encode(),
            "FILE is not valid YAML: line 2, column 5: aliases (*name) are not read: write it out",
        ),
        (b"[" * 5000, "FILE is nested too deeply"),
        (b"#" * 1_000_001, "FILE is larger than 1,000,000 bytes"),
        (b"ratio: x\n", "FILE: ratio = 'x': pass a number"),
        (b"max_steps: 3\n", "FILE: unknown key 'max_steps'; did you mean 'max_train_steps'?"),
        (None, "error: FILE: No such file or directory\n"),
    ],
)
def test_a_bad_file_of_settings_is_told_in_a_line(content, message, tmp_path):
    path = tmp_path / "run.yaml"
    if content is not None:
        path.write_bytes(content)
    printed = told_by(["--config", str(path)]).replace(str(path), "FILE")
    assert message in printed
    assert "run.yaml" not in printed.replace("FILE", "")
    assert all(line.startswith("error: ") for line in printed.splitlines())
    assert len(printed) < 500
