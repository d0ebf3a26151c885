"""What a GPU is asked first: the gpu tests, Table 10 on a few images, latencies, a training step.

Each stage is a command of its own, whose output is in a log beside the results; a stage that fails is noted,
and the others run. What was done is not done again. `first-gpu-run.json` has no paths and prompts: it is
meant to be sent in.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from PIL import Image
from rich.console import Console

from ..environment import describe_environment
from ..errors import EvalError
from ..files import write_bytes
from .settings import FirstGpuSettings

ROOT = Path(__file__).parents[2]
EVAL = (sys.executable, "-m", "agentsd_eval.cli")
METHODS = "baseline,baseline@17,baseline@12,agentsd,downsample,step-caching,paper,tomesd,deepcache-2"


def command(settings: FirstGpuSettings, console: Console) -> None:
    """Run each stage, and write after each what is known."""
    device = torch.device(settings.device or "cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise EvalError("no CUDA device is here; --device cpu tries all stages on the CPU")
    settings.out.mkdir(parents=True, exist_ok=True)
    path = settings.out / "first-gpu-run.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    found["environment"] = describe_environment(device)
    for stage, arguments in stages(settings, device).items():
        if found.get(stage, {}).get("done"):
            continue
        console.print(f"{stage}: {settings.out / stage}.log", soft_wrap=True)
        with (settings.out / f"{stage}.log").open("w", encoding="utf-8") as log:
            code = subprocess.run(arguments, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT).returncode
        found[stage] = {"done": code == 0, "exit_code": code} | result(stage, settings.out)
        write_bytes(path, json.dumps(found, indent=1).encode())
        console.print("  done" if code == 0 else f"  [bold]failed[/bold] (exit {code})")
    console.print(f"please send in {path}", soft_wrap=True)


def stages(settings: FirstGpuSettings, device: torch.device) -> dict[str, list[str]]:
    """Return the command of each stage."""
    out = settings.out.resolve()
    shared = ["--device", str(device), "--dtype", "float16" if device.type == "cuda" else "float32"]
    model = ["--model", settings.model]
    size, steps = str(settings.sizes[0]), str(settings.steps)
    short = ["--features", "efficientnet-lite0", "--limit", str(settings.limit), "--steps", steps]
    short += ["--height", size, "--width", size, "--out", str(out / "table")]
    runs = ["--scheduler", "dpm++karras", "--steps", "25", "--sizes", ",".join(map(str, settings.sizes))]
    runs += ["--scopes", "pipeline", "--repeats", "3", "--methods", METHODS, "--out", str(out / "latency")]
    study = "agentsd_eval.research.first_gpu_run"
    return {
        "tests": [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests"],
        "table": [*EVAL, "table", "--config", "table10", *model, *shared, *short],
        "latency": [*EVAL, "latency", *model, *shared, *runs],
        "training": [sys.executable, "-m", study, settings.model, str(device), str(out / "training.json")],
    }


def result(stage: str, out: Path) -> dict[str, Any]:
    """Return what a stage left: counts of tests, rows, or the peak of training."""
    if stage == "tests":
        log = (out / "tests.log").read_text(encoding="utf-8")
        return {name: int(count) for count, name in re.findall(r"(\d+) (passed|failed|skipped|errors?)", log)}
    if stage == "training":
        path = out / "training.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    files = [*out.glob(f"{stage}*/{stage}.jsonl")]
    lines = files[0].read_text(encoding="utf-8").splitlines() if files else []
    return {"rows": [json.loads(line) for line in lines]}


def train(model: str, device: str, path: Path, steps: int = 3) -> None:
    """Finetune as configs/dreambooth_sd15.yaml says for a few steps; write the peak of memory in GB."""
    from agentsd.dreambooth.config import DreamBoothConfig
    from agentsd.dreambooth.training import Run

    on_gpu = device.startswith("cuda")
    with TemporaryDirectory() as folder:
        Image.effect_noise((512, 512), 64).convert("RGB").save(Path(folder) / "view.png")
        config = DreamBoothConfig.model_validate(
            {
                "pretrained_model_name_or_path": model,
                "instance_data_dir": folder,
                "instance_prompt": "a photo of sks dog",
                "output_dir": Path(folder) / "out",
                "mixed_precision": "fp16" if on_gpu else "no",
                "gradient_checkpointing": True,
                "max_train_steps": steps,
                "num_inference_steps": 2,
                "num_validation_images": 1,
                "report_to": None,
            }
        )
        Run(config).train()
    peak = torch.cuda.max_memory_allocated() / 1e9 if on_gpu else None
    write_bytes(path, json.dumps({"peak_gb": peak, "steps": steps}).encode())


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
