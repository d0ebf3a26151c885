"""Every command on a folder of Stable Diffusion 1.5's parts, as a user has it, in half-precision files."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agentsd_eval.cli import main
from agentsd_eval.errors import EvalError
from agentsd_eval.images.models import load_pipeline
from agentsd_eval.presets import load_settings
from agentsd_eval.settings import RunSettings, Settings
from agentsd_eval.studies.table import table_methods
from click.testing import CliRunner
from PIL import Image
from sd_folder import save_sd15, save_sd21, save_sdxl, stand_in_for_inception

SMALL = ("--height", 64, "--width", 64)


def invoke(*arguments: Any, code: int = 0) -> str:
    """Run a command; return what it printed, blanks made one."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return re.sub(r"\s+", " ", result.output)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def sd15(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sd15(tmp_path_factory.mktemp("sd15"), tokenizer, "fp16")


@pytest.fixture(scope="module")
def table10(sd15: Path, photographs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
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


@pytest.mark.parametrize(
    ("preset", "rows"),
    [
        ("table10", [f"{name}-r0.{i}" for name in ("tomesd", "agentsd") for i in (1, 2, 3, 4, 5)]),
        ("table11", ["k-0", "k-0.025", "k-0.075", "k-0.15"]),
        ("table12", ["scale--0.5", "scale--0.25", "scale--0.15", "scale--0.05"]),
        ("table13", ["early-0.2", "early-0.4", "early-0.6", "early-0.8"]),
    ],
)
def test_presets_have_the_papers_rows(preset: str, rows: list[str]) -> None:
    planned = [method.key for method in table_methods(load_settings(RunSettings, preset, {}))]
    assert [re.sub(r"(-[0-9a-f]{8})?-unfused$", "", key) for key in planned] == ["baseline", *rows]


def test_table10_is_the_papers_table(table10: tuple[Path, str]) -> None:
    folder, printed = table10
    head, _, *lines = (folder / "table.md").read_text().splitlines()
    assert head == "| method | ratio | FID | s/img | GB/img |"
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[: lines.index("")]]
    methods = [("baseline", "-")] + [
        (name, str(ratio)) for name in ("tomesd", "agentsd") for ratio in (0.1, 0.5)
    ]
    assert [tuple(line[:2]) for line in table[:-1]] == methods
    assert table[-1][0] == "real/real"
    assert all(float(line[2]) > 0 and float(line[3]) > 0 and line[4] == "n/a" for line in table[:-1])
    with (folder / "table.csv").open(newline="") as file:
        first = next(csv.reader(file))
    assert first[:6] == ["method", "ratio", "fd", "seconds", "memory_per_image", "features"]
    assert "the paper's table" in printed
    assert "pytorch-fid's Inception v3" in (folder / "table.md").read_text()
    assert {row["features"] for row in rows_of(folder / "table.jsonl")} == {"inception"}


def test_a_trial_says_what_the_whole_run_takes(table10: tuple[Path, str]) -> None:
    folder, printed = table10
    assert len(list((folder / "images").rglob("*.png"))) == 3 * 5
    assert re.search(
        r"15 images, about \d+ min at most, .* Without --limit: 10,000 images, about [\d.]+ h", printed
    )
    prompts = [row["prompt"] for row in csv.DictReader((folder / "table-images.csv").open(newline=""))]
    tench, goldfish = (f"A high quality photograph of a {name}." for name in ("tench", "goldfish"))
    assert prompts[:3] == [tench, tench, goldfish]


def test_images_are_not_black(table10: tuple[Path, str]) -> None:
    folder, _ = table10
    for path in (folder / "images").rglob("*.png"):
        assert np.asarray(Image.open(path)).std() > 0, path


def test_a_report_of_it(table10: tuple[Path, str]) -> None:
    folder, _ = table10
    invoke("report", folder, "--images", 2)
    page = (folder / "report.html").read_text()
    heads = re.findall(r"<th><button>(.*?)</button></th>", page)
    assert heads[:5] == ["method", "ratio", "FID", "s/img", "GB/img"]
    assert page.index("the paper&#39;s table") < page.index("distance of distributions")


def test_compare_draws_what_any_model_knows(sd15: Path, tmp_path: Path) -> None:
    printed = invoke(
        "compare", "--model", sd15, "--dtype", "float16", "--images", 2, "--steps", 2, *SMALL,
        "--methods", "agentsd", "--out", tmp_path / "compare.png",
    )  # fmt: skip
    assert "agentsd r=0.4" in printed
    assert "emoji" not in printed


def test_latency(sd15: Path, tmp_path: Path) -> None:
    printed = invoke(
        "latency", "--model", sd15, "--methods", "agentsd", "--sizes", 64, "--steps", 2, "--repeats", 1,
        "--out", tmp_path,
    )  # fmt: skip
    assert "agentsd r=0.4" in printed


def test_dreambooth_takes_half_precision_files(sd15: Path, photographs: Path, tmp_path: Path) -> None:
    from agentsd.dreambooth.config import DreamBoothConfig
    from agentsd.dreambooth.training import Run

    config = DreamBoothConfig(
        pretrained_model_name_or_path=str(sd15),
        instance_data_dir=photographs,
        instance_prompt="a sks cat",
        output_dir=tmp_path,
        resolution=64,
        max_train_steps=1,
        num_inference_steps=2,
        num_validation_images=1,
        use_8bit_adam=False,
        report_to=None,
    )
    Run(config).train()
    settings = Settings(model=str(tmp_path), device="cpu", scheduler="model")
    pipe = load_pipeline(settings)
    assert pipe.unet.dtype == torch.float32


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("variant", [None, "fp16"])
def test_either_kind_of_file_loads(tokenizer: Any, tmp_path: Path, variant: str | None, dtype: Any) -> None:
    folder = save_sd15(tmp_path / "model", tokenizer, variant)
    pipe = load_pipeline(Settings(model=str(folder), dtype=dtype, device="cpu"))
    assert pipe.safety_checker is None
    assert {pipe.unet.dtype, pipe.vae.dtype, pipe.text_encoder.dtype} == {getattr(torch, dtype)}
    assert type(pipe).__name__ == "StableDiffusionPipeline"


def test_a_folder_without_weights_is_named(tokenizer: Any, tmp_path: Path) -> None:
    folder = save_sd15(tmp_path / "model", tokenizer)
    for path in (folder / "unet").glob("*.safetensors"):
        path.unlink()
    with pytest.raises(EvalError, match=r"can't load the model .*diffusion_pytorch_model"):
        load_pipeline(Settings(model=str(folder), device="cpu"))


def test_sdxl_in_half_precision_files(tokenizer: Any, tmp_path: Path) -> None:
    folder = save_sdxl(tmp_path / "sdxl", tokenizer, "fp16")
    printed = invoke(
        "compare", "--model", folder, "--images", 1, "--steps", 2, *SMALL, "--methods", "agentsd",
        "--methods", "tomesd", "--out", tmp_path / "compare.png",
    )  # fmt: skip
    assert "agentsd r=0.4" in printed


def test_sd21_keeps_its_prediction_and_its_upcast(tokenizer: Any, tmp_path: Path) -> None:
    folder = save_sd21(tmp_path / "sd21", tokenizer)
    pipe = load_pipeline(Settings(model=str(folder), device="cpu", scheduler="plms"))
    assert pipe.scheduler.config.prediction_type == "v_prediction"
    assert pipe.unet.config.upcast_attention
    printed = invoke(
        "compare", "--model", folder, "--images", 1, "--steps", 2, *SMALL, "--methods", "agentsd", "--out",
        tmp_path / "compare.png",
    )  # fmt: skip
    assert "agentsd r=0.4" in printed


@pytest.mark.slow
def test_the_toy_model_is_asked_for_by_nobody_else(model_folder: str, tmp_path: Path) -> None:
    """A table of another model, then every module, where the toy model's package can't be imported."""
    (tmp_path / "prompts.txt").write_text("a cat\n")
    command = ["table", "--model", model_folder, "--prompts", str(tmp_path / "prompts.txt"), *map(str, SMALL)]
    command += ["--steps", "2", "--images", "2", "--methods", "agentsd", "--ratios", "0.5"]
    command += ["--fewer-steps", "none", "--reference-steps", "none", "--out", str(tmp_path / "run")]
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
    assert (tmp_path / "run" / "table.md").exists()
