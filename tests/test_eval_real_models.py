"""Every command on a folder of Stable Diffusion 1.5's parts, as a user has it, in half-precision files."""

import csv
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from accelerate import cpu_offload
from agentsd_eval.errors import EvalError
from agentsd_eval.images import models
from agentsd_eval.images.methods import parse_method
from agentsd_eval.images.models import load_pipeline
from agentsd_eval.images.prompts import from_prompts
from agentsd_eval.images.sampling import sample
from agentsd_eval.settings import RunSettings, Settings
from commands import ALONE, invoke, rows_of
from PIL import Image
from safetensors.torch import save_file
from sd_folder import save_sd15, save_sd21, save_sdxl, stand_in_for_inception

SMALL = ("--height", 64, "--width", 64)


@pytest.fixture(scope="module")
def sd15(tokenizer, tmp_path_factory):
    return save_sd15(tmp_path_factory.mktemp("sd15"), tokenizer, "fp16")


@pytest.fixture(scope="module")
def table10(sd15, photographs, tmp_path_factory):
    """The folder of a trial of Table 10 on photographs, and what was printed."""
    folder = tmp_path_factory.mktemp("presets")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        stand_in_for_inception(patch)
        printed = invoke(
            "table", "--config", "table10", "--model", sd15, "--reference", photographs, *SMALL,
            "--steps", 2, "--limit", 3, "--ratios", "0.1,0.5", "--out", folder / "run",
        )  # fmt: skip
    return folder / "run-limit-3", printed


def test_table10_is_the_papers_table(table10):
    folder, printed = table10
    head, _, *lines = (folder / "table.md").read_text().splitlines()
    assert head == "| method | ratio | FID | s/img | GB/img |"
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[: lines.index("")]]
    methods = [[name, ratio] for name in ("tomesd", "agentsd") for ratio in ("0.1", "0.5")]
    assert [line[:2] for line in table[:-1]] == [["baseline", "-"], *methods]
    assert table[-1][0] == "real/real"
    assert all(float(line[2]) > 0 and float(line[3]) > 0 and line[4] == "n/a" for line in table[:-1])
    with (folder / "table.csv").open(newline="") as file:
        first = next(csv.reader(file))
    assert first[:6] == ["method", "ratio", "fd", "seconds", "memory_per_image", "features"]
    assert "the paper's table" in printed
    assert "pytorch-fid's Inception v3" in (folder / "table.md").read_text()
    assert {row["features"] for row in rows_of(folder / "table.jsonl")} == {"inception"}


def test_a_trial_says_what_the_whole_run_takes(table10):
    folder, printed = table10
    told = r"15 images, about \d+ min at most, .* Without --limit: 10,000 images, about [\d.]+ h"
    assert re.search(told, printed)
    prompts = [row["prompt"] for row in csv.DictReader((folder / "table-images.csv").open(newline=""))]
    tench, goldfish = (f"A high quality photograph of a {name}." for name in ("tench", "goldfish"))
    assert prompts[:3] == [tench, tench, goldfish]


def test_images_are_not_black(table10):
    paths = list((table10[0] / "images").rglob("*.png"))
    assert len(paths) == 3 * 5
    assert all(np.asarray(Image.open(path)).std() > 0 for path in paths)


COMPARE = ("compare", "--steps", 2, *SMALL, "--images", 2, "--methods", "agentsd,tomesd")
LATENCY = ("latency", "--steps", 2, "--sizes", 64, "--repeats", 1, "--methods", "agentsd")
HALF = ("--dtype", "float16")


@pytest.mark.parametrize(
    ("save", "words"),
    [
        (partial(save_sd15, variant="fp16"), (*COMPARE, *HALF)),
        (partial(save_sd15, variant="fp16"), LATENCY),
        (partial(save_sdxl, variant="fp16"), COMPARE),
        (save_sd21, COMPARE),
    ],
    ids=["compare on SD 1.5", "latency on SD 1.5", "compare on SDXL", "compare on SD 2.1"],
)
def test_a_command_takes_each_kind_of_model(save, words, tokenizer, tmp_path):
    folder = save(tmp_path / "model", tokenizer)
    printed = invoke(*words, "--model", folder, "--out", tmp_path / "out.png")
    assert "agentsd r=0.4" in printed
    assert "emoji" not in printed


def test_sd21_keeps_its_prediction_and_its_upcast(tokenizer, tmp_path):
    folder = save_sd21(tmp_path / "sd21", tokenizer)
    pipe = load_pipeline(Settings(model=str(folder), device="cpu", scheduler="plms"))
    assert pipe.scheduler.config.prediction_type == "v_prediction"
    assert pipe.unet.config.upcast_attention


def test_dreambooth_takes_half_precision_files(sd15, run_config, tmp_path):
    from agentsd.dreambooth.training import Run

    given = {"pretrained_model_name_or_path": str(sd15), "class_data_dir": None, "resolution": 64}
    Run(run_config(**given, max_train_steps=1, output_dir=tmp_path)).train()
    pipe = load_pipeline(Settings(model=str(tmp_path), device="cpu", scheduler="model"))
    assert pipe.unet.dtype == torch.float32


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("variant", [None, "fp16"])
def test_either_kind_of_file_loads(tokenizer, tmp_path, variant, dtype):
    folder = save_sd15(tmp_path / "model", tokenizer, variant)
    pipe = load_pipeline(Settings(model=str(folder), dtype=dtype, device="cpu"))
    assert pipe.safety_checker is None
    assert {pipe.unet.dtype, pipe.vae.dtype, pipe.text_encoder.dtype} == {getattr(torch, dtype)}
    assert type(pipe).__name__ == "StableDiffusionPipeline"


def test_a_folder_without_weights_is_named(tokenizer, tmp_path):
    folder = save_sd15(tmp_path / "model", tokenizer)
    for path in (folder / "unet").glob("*.safetensors"):
        path.unlink()
    with pytest.raises(EvalError, match=r"can't load the model .*diffusion_pytorch_model"):
        load_pipeline(Settings(model=str(folder), device="cpu"))


def test_a_pipeline_whose_weights_are_elsewhere_makes_the_same_images(make_pipeline):
    settings, specs = RunSettings(model="x/y", steps=2, height=32, width=32), from_prompts(["a cat"], 1, 0)
    method = parse_method("fast", None, settings)
    whole, offloaded = make_pipeline(), make_pipeline()
    cpu_offload(offloaded.unet)
    assert offloaded.unet.device.type == "meta"
    [[one], [other]] = (sample(pipe, method, specs, settings)[0] for pipe in (whole, offloaded))
    assert one == other


def test_offloading_is_that_of_diffusers(monkeypatch):
    monkeypatch.setattr(models, "find_device", torch.device)
    pipe = MagicMock()
    monkeypatch.setattr("agentsd_eval.settings.DRIVERS", (Path("/"),))
    for given in ("model", "sequential"):
        models.offload(pipe, RunSettings(offload=given, device="cuda:1"))
        getattr(pipe, f"enable_{given}_cpu_offload").assert_called_once_with(device=torch.device("cuda:1"))
    models.offload(pipe, RunSettings(device="cuda:1"))
    assert len(pipe.mock_calls) == 2
    with pytest.raises(EvalError, match="--offload = model: it takes a GPU, and --device is cpu"):
        models.offload(pipe, RunSettings(offload="model", device="cpu"))


PARTS = ("model.diffusion_model.a", "first_stage_model.a")
KINDS = "StableDiffusionPipeline", "StableDiffusionXLPipeline"


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        ((*PARTS, "cond_stage_model.a"), KINDS[0]),
        ((*PARTS, "conditioner.embedders.0.a"), KINDS[1]),
        ((PARTS[0], "cond_stage_model.a"), None),
        (PARTS, None),
    ],
)
def test_a_model_may_be_one_file(names, kind, pipe, tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    save_file({name: torch.zeros(1) for name in names}, path)
    loads = {name: MagicMock(return_value=pipe) for name in KINDS}
    for name, load in loads.items():
        monkeypatch.setattr(f"diffusers.{name}.from_single_file", load)
    settings = Settings(model=str(path), device="cpu")
    if kind is None:
        with pytest.raises(EvalError, match=r"can't load the model .*; give 'demo', "):
            load_pipeline(settings)
    else:
        assert load_pipeline(settings) is pipe
        loads[kind].assert_called_once_with(str(path), torch_dtype=torch.float32)
    assert sum(load.call_count for load in loads.values()) == (kind is not None)


@pytest.mark.slow
def test_the_toy_model_is_asked_for_by_nobody_else(model_folder, tmp_path):
    """A table of another model, then every module, where the toy model's package can't be imported."""
    words = ["table", "--model", model_folder, *SMALL, "--steps", 2, "--images", 2, "--methods", "agentsd"]
    command = list(map(str, [*words, *ALONE, "--out", tmp_path]))
    parts = [
        f"agentsd_eval.{path.parent.name}.{path.stem}"
        for path in (Path(__file__).parents[1] / "eval").glob("*/*.py")
        if path.stem not in ("__init__", "__main__", "scenes", "scene_details")
    ]
    code = f"""
import importlib, sys
sys.modules["agentsd_demo"] = None
from agentsd_eval.cli import main
main({command!r}, standalone_mode=False)
for part in {parts!r}:
    importlib.import_module(part)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "table.md").exists()
