"""The commands end to end on a tiny pipeline."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agentsd_eval import cost
from agentsd_eval.cli import main
from agentsd_eval.cost.latency import Case, measure, methods_of, speedup_of
from agentsd_eval.images import other_packages
from agentsd_eval.images.methods import parse_method
from agentsd_eval.images.sampling import Seconds
from agentsd_eval.quality.encoders import ClipScore
from agentsd_eval.quality.features import features_of, load_network
from agentsd_eval.settings import LatencySettings
from agentsd_eval.studies.compare import with_differences
from click.testing import CliRunner
from diffusers import UNet2DConditionModel
from PIL import Image
from sd_folder import save_clip
from torch._dynamo.testing import CompileCounter
from transformers import CLIPModel, CLIPProcessor

ROOT = Path(__file__).parents[1]


def invoke(*arguments: Any, code: int = 0) -> str:
    """Run a command; return what it printed, blanks made one."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return re.sub(r"\s+", " ", result.output)


def test_compare(model_folder: str, tmp_path: Path) -> None:
    out = tmp_path / "new" / "grid.png"
    printed = invoke(
        "compare", "--model", model_folder, "--prompt", "a cat", "--prompt", "a dog", "--steps", 8,
        "--ratio", 0.5, "--differences", "--out", out,
    )  # fmt: skip
    for method in ("baseline", "baseline@4/", "tomesd r=0.5", "agentsd r=0.5"):
        assert method in printed
    assert "fast, each call: FFFfFfFf (8 calls: 5 full; 3 cached; 2 corrected)" in printed
    with Image.open(out) as image:
        assert image.size[0] > 2 * 160
        assert image.size[1] > 9 * 160  # five rows of images, four of differences
        assert image.size[1] < 10 * 168 + 60


def test_a_difference_is_drawn_four_times_as_strong() -> None:
    baseline = Image.new("RGB", (2, 1), (100, 100, 100))
    image = Image.new("RGB", (2, 1), (100, 100, 100))
    image.putpixel((1, 0), (90, 103, 255))
    [[same], [other], [drawn]], labels = with_differences([[baseline], [image]], ["baseline", "fast"])
    assert (same, other) == (baseline, image)
    assert [drawn.getpixel((x, 0)) for x in (0, 1)] == [(255, 255, 255), (215, 243, 0)]
    assert labels[:2] == ["baseline", "fast"]


def test_an_error_stands_alone(tmp_path: Path) -> None:
    """transformers would advise to install torchvision, which breaks a CPU build of torch."""
    words = ["table", "--reference", tmp_path, "--out", tmp_path / "out"]
    command = [sys.executable, "-m", "agentsd_eval.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"error: .* holds 0 images .*\n", done.stderr)


REFUSED = (
    "table --methods agentsdd",
    "compare --methods fast/unipc",
    "table --model ./nofolder",
    "check --scheduler unipck",
    "table --config nope",
    "table --reference /nowhere",
    "table --clip /nowhere",
    "compare --steps 0",
    "check --device toaster!",
    "fid /nowhere /nowhere",
)


def test_wrong_words_are_refused_before_torch_is_loaded() -> None:
    """Loading torch and diffusers takes seconds. OpenMP is told before that its threads should not spin."""
    code = """
import os, sys
from agentsd_eval.cli import main
for words in sys.argv[1:]:
    try:
        main(words.split(), standalone_mode=False)
    except SystemExit as ended:
        assert ended.code == 2, (words, ended.code)
    else:
        raise AssertionError(words)
    assert "torch" not in sys.modules, words
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
"""
    done = subprocess.run([sys.executable, "-c", code, *REFUSED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == done.stderr.count("error: ") == len(REFUSED) + 1  # of two folders


@pytest.fixture(scope="module")
def run(model_folder: str, photographs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished table."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "prompts.txt").write_text("a cat\na dog\n")
    printed = invoke(
        "table", "--model", model_folder, "--prompts", folder / "prompts.txt", "--reference", photographs,
        "--methods", "agentsd", "--methods", "tomesd+deepcache", "--ratios", 0.5, "--steps", 3, "--images", 5,
        "--batch-size", 2, "--fewer-steps", 0.4, "--samplers", "none", "--reference-steps", "none",
        "--out", folder,
    )  # fmt: skip
    assert "distance of distributions" in printed
    return folder


def test_table_has_a_row_for_each_method_and_a_floor(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "table.jsonl").read_text().splitlines()]
    assert [row["method"] for row in rows] == [
        "baseline",
        "baseline@1",
        "agentsd",
        "tomesd+deepcache",
        "real/real",
    ]
    baseline, fewer, agent, *_ = rows
    assert fewer["macs"] < agent["macs"] < baseline["macs"]
    assert fewer["baseline_distance"] > 0 < fewer["speedup"]
    assert (baseline["speedup"], baseline["ratio"], agent["ratio"], agent["backend"]) == (
        1.0,
        None,
        0.5,
        "sdpa",
    )
    assert agent["fd_change"] == pytest.approx(agent["fd"] - baseline["fd"])
    assert agent["psnr"] > 20
    assert agent["memory_per_image"] is None
    assert "run" not in agent
    run_file = json.loads((run / "run.json").read_text())
    facts = run_file["results"]["table"]
    assert facts["settings"]["steps"] == 3
    assert {"torch", "diffusers", "tomesd", "DeepCache"} <= set(facts["versions"])
    (maker,) = run_file["environments"].values()
    assert maker.items() <= facts.items()
    assert (
        maker["commit"] == subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    )
    assert maker["threads"] == torch.get_num_threads()
    markdown = (run / "table.md").read_text()
    assert "| agentsd | 0.5 |" in markdown
    assert "| agentsd r=0.5 | 5 |" in markdown
    assert "≈ marks a change inside the noise" in markdown
    assert "too few to judge" in markdown
    assert not re.search(r"\d ≈|\d ± \d", markdown)


def test_a_second_run_goes_on_with_another_ratio(run: Path, model_folder: str, photographs: Path) -> None:
    before = (run / "table.jsonl").read_text().splitlines()
    invoke(
        "table", "--model", model_folder, "--prompts", run / "prompts.txt", "--reference", photographs,
        "--methods", "agentsd", "--ratios", 0.5, "--ratios", 0.25, "--steps", 3, "--images", 5,
        "--batch-size", 2, "--fewer-steps", "none", "--reference-steps", "none", "--out", run,
    )  # fmt: skip
    after = {r.get("label"): r for r in map(json.loads, (run / "table.jsonl").read_text().splitlines()[:-1])}
    old = json.loads(before[2])
    assert after["agentsd r=0.5"]["fd"] == old["fd"]
    assert after["agentsd r=0.5"]["seconds"] == old["seconds"]
    assert after["agentsd r=0.5"]["speedup"] == old["speedup"]
    # another process made it at another time: its speed-up is over the baseline's batches timed again
    assert after["agentsd r=0.25"]["speedup_batches"] == 2  # and one of a single image
    (run / "table.jsonl").write_text("\n".join(before) + "\n")


@pytest.fixture(scope="session")
def clip_folder(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny CLIP model on disk."""
    return save_clip(tmp_path_factory.mktemp("clip"), tokenizer)


def test_clip_score_is_the_cosine_of_the_embeddings(clip_folder: Path, photographs: Path) -> None:
    images = [Image.open(path) for path in sorted(photographs.glob("*.png"))]
    prompts = ["a cat"] * 5 + ["a dog"] * 4
    scores = ClipScore(str(clip_folder), torch.device("cpu"))(images, prompts)
    model, processor = (
        CLIPModel.from_pretrained(clip_folder).eval(),
        CLIPProcessor.from_pretrained(clip_folder),
    )
    inputs = processor(text=prompts[5:6], images=images[5:6], return_tensors="pt")
    with torch.no_grad():
        logit = model(**inputs).logits_per_image / model.logit_scale.exp()
    assert scores.shape == (9,)
    assert scores[5] == pytest.approx(max(0.0, 100 * float(logit)), rel=1e-4, abs=1e-4)


def test_clip_score_in_the_table(model_folder: str, clip_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a cat\n")
    printed = invoke(
        "table", "--model", model_folder, "--prompts", tmp_path / "prompts.txt", "--methods", "agentsd",
        "--fewer-steps", "none", "--reference-steps", "none", "--clip", clip_folder, "--steps", 2,
        "--images", 2, "--out", tmp_path / "run",
    )  # fmt: skip
    assert "CLIP score" in (tmp_path / "run" / "table.md").read_text()
    assert "real/real" not in printed


def test_report_is_one_page_without_links(run: Path) -> None:
    invoke("report", run, "--images", 2)
    page = (run / "report.html").read_text()
    assert page.count("data:image/webp;base64,") == 2 * 4
    assert page.count("<svg") == 1
    assert not re.findall(r'(?:src|href)="(?!data:|#)', page)
    assert "agentsd r=0.5" in page


def test_fid_of_a_folder_and_itself_is_none(
    photographs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    printed = invoke("fid", photographs, photographs, "--features", "efficientnet-lite0")
    assert "9 / 9" in printed
    assert re.search(r" -?0\.000 ", printed)


def latency(folder: Path, *arguments: Any) -> tuple[list[dict[str, Any]], str]:
    """The rows of `latency` on a tiny model, and what it printed."""
    small = ("--ratio", 0.5, "--steps", 3, "--sizes", 64, "--repeats", 1, "--out", folder)
    printed = invoke("latency", *small, *arguments)
    return [json.loads(line) for line in (folder / "latency.jsonl").read_text().splitlines()], printed


def test_latency(model_folder: str, tmp_path: Path) -> None:
    words = ("--model", model_folder, "--methods", "agentsd,deepcache", "--fewer-steps", 0.4)
    rows, printed = latency(tmp_path / "sdpa", *words)
    assert "forward early" in printed
    found = {(row["scope"], row["method"]): row for row in rows}
    assert ("forward late", "deepcache") not in found  # it has no cost within one call
    assert len(found) == 2 * 2 + 4  # with baseline@1 in whole runs
    early, late = (found[f"forward {phase}", "agentsd"] for phase in ("early", "late"))
    baseline = found["forward early", "baseline"]
    assert early["macs"] < late["macs"] < baseline["macs"]
    assert baseline["speedup"] == 1.0
    unfused, _ = latency(tmp_path / "unfused", *words, "--backend", "unfused", "--scopes", "forward")
    assert {row["backend"] for row in unfused} == {"unfused"}
    assert unfused[0]["macs"] == baseline["macs"]  # the count doesn't depend on how attention is computed


def test_a_speed_up_is_of_the_same_rounds() -> None:
    """By hand: rounds of 4, 6 and 9 s beside 2, 2 and 6 s are ratios of 2, 3 and 1.5."""
    settings = LatencySettings()
    baseline, ours = (parse_method(name, 0.5, settings) for name in ("baseline", "agentsd"))
    seconds = {
        method: [Seconds(10 * one, one) for one in rounds]
        for method, rounds in {baseline: (4.0, 6.0, 9.0), ours: (2.0, 2.0, 6.0)}.items()
    }
    found = speedup_of(seconds, ours, torch.device("cpu"))
    assert found == {"speedup": 2.0, "speedup_low": 1.5, "speedup_high": 3.0}


def test_methods_take_turns_on_the_same_weights(make_pipeline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in its own U-Net, warm-up first, and without a count none is counted."""
    pipe, order = make_pipeline(), []
    settings = LatencySettings(
        methods=("agentsd",), fewer_steps=(), scopes=("forward",), sizes=(64,), repeats=2, count=False
    )

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        order.append(id(self))
        assert {id(weight) for weight in self.parameters()} == weights
        return forward(self, *args, **kwargs)

    weights = {id(weight) for weight in pipe.unet.parameters()}
    forward = UNet2DConditionModel.forward
    monkeypatch.setattr(UNet2DConditionModel, "forward", noted)
    case = Case("forward early", 64, 1)
    rows = list(measure(pipe, [case], methods_of(settings), settings, lambda: order.append("round")))
    first, second = order[:2]
    assert first != second
    assert order == [first, second, "round"] * 3
    assert [row["macs"] for row in rows] == [None, None]


def test_a_method_that_memory_does_not_do_for_costs_no_others_figures(
    model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_much(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("unfused attention's score matrix")

    monkeypatch.setattr(other_packages._NoCore, "__call__", too_much)
    monkeypatch.setattr(cost.latency, "memory_per_image", too_much)  # what fits, but not with one image more
    words = ("--methods", "agentsd,no-attention", "--scopes", "forward")
    rows, _ = latency(tmp_path, "--model", model_folder, *words)
    for key in ("seconds", "macs", "speedup"):
        assert [row[key] is None for row in rows] == [False, False, True] * 2
    assert (tmp_path / "latency.md").read_text().count("out of memory") == 2


@pytest.mark.slow
def test_latency_compiled(model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph for each kind of call, and none more while they are timed. It runs as it was traced."""
    counter = CompileCounter()
    with_counter = partialmethod(torch.nn.Module.compile, backend=counter)
    monkeypatch.setattr(torch.nn.Module, "compile", with_counter)
    words = ("--compile", "--methods", "agentsd", "--scopes", "forward", "--repeats", 3)
    rows, printed = latency(tmp_path, "--model", model_folder, *words)
    assert "3 steps (dpm++karras), compiled" in printed
    assert [row["method"] for row in rows] == ["baseline", "agentsd"] * 2
    assert counter.frame_count == 3  # the baseline's, and two phases of AgentSD


def test_features_are_kept_under_the_images_content(photographs: Path, tmp_path: Path) -> None:
    calls = 0
    network = load_network("efficientnet-lite0", torch.device("cpu"))
    forward = network._forward

    def counted(pixels: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return forward(pixels)

    network._forward = counted
    paths = sorted(photographs.glob("*.png"))
    first = features_of(network, paths, tmp_path)
    assert first.shape == (9, 1280)
    assert np.array_equal(features_of(network, paths, tmp_path), first)
    assert calls == 1
    features_of(network, paths[:8], tmp_path)
    features_of(network, paths, tmp_path, crop=(32, 32))
    assert calls == 3
    kept = next(tmp_path.glob("*.npy"))
    kept.write_bytes(kept.read_bytes()[:100])  # cut off: made again
    for part in (paths, paths[:8]):
        features_of(network, part, tmp_path)
    features_of(network, paths, tmp_path, crop=(32, 32))
    assert calls == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("compare", "--methods", "tome"),
            "unknown method 'tome' in 'tome'; did you mean tomesd? use baseline",
        ),
        (("compare", "--ratio", "0.9"), "--ratio = 0.9: pass 0.75 or less"),
        (("compare", "--model", "/no/such/model"), "--model = /no/such/model: there is no such folder"),
        (("compare", "--device", "cuda:77"), "--device = cuda:77: this machine has no CUDA device; use cpu"),
        (("compare", "--device", "toaster"), "device 'toaster'"),
        (("check", "--dtype", "fp16"), "--dtype = fp16: did you mean float16? choose float32, float16 or"),
        (("table", "--fewer-steps", "25"), "--fewer-steps = 25: pass shares of the steps between 0 and 1"),
        (("table", "--steps", "many"), "--steps = many: pass a whole number"),
        (("check", "--methods", "TeaCache"), "docs/how_to/coming_from.md compares it"),
        (
            ("check", "--methods", "no-attentio"),
            "unknown method 'no-attentio' in 'no-attentio'; use baseline",
        ),
        (("table", "--ratios", "0.9"), "error: --ratios = 0.9: pass 0.75 or less"),
        (("check", "--offload", "model"), "--offload = model: this machine has no GPU whose memory it would"),
        (("table", "--stepz", "3"), "Error: No such option '--stepz'"),
        (("check", "--model", "gone.safetensors"), "--model = gone.safetensors: there is no such file"),
        (("latency", "--arch", "sd3"), "--arch = sd3: choose sd15 or sdxl"),
        (("table", "--config", "/no/such.yaml"), "can't read the configuration /no/such.yaml"),
        (("report", "/no/such"), "folder = '/no/such': there is no such folder"),
    ],
)
def test_errors_are_one_message_and_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    if {"cuda:77", "--offload"} & {*arguments} and torch.cuda.is_available():
        pytest.skip("there may be a CUDA device")
    printed = invoke(*arguments, code=2)
    assert message in printed
    assert printed.lower().count("error: ") == 1


def test_a_broken_image_is_named_before_anything_is_made(
    model_folder: str, photographs: Path, tmp_path: Path
) -> None:
    (tmp_path / "prompts.txt").write_text("a cat\n")
    real = tmp_path / "real"
    real.mkdir()
    for path in photographs.glob("*.png"):
        (real / path.name).write_bytes(path.read_bytes())
    (real / "3.png").write_bytes((real / "3.png").read_bytes()[:200])
    printed = invoke(
        "table", "--model", model_folder, "--prompts", tmp_path / "prompts.txt", "--reference", real,
        "--out", tmp_path / "run", code=2,
    )  # fmt: skip
    assert "can't read the image" in printed
    assert "3.png" in printed
    assert not (tmp_path / "run" / "images").exists()
