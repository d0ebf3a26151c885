"""The commands end to end on a tiny pipeline."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from agentsd_eval.quality.encoders import ClipScore
from agentsd_eval.studies.compare import with_differences
from commands import ALONE, invoke, rows_of
from PIL import Image
from sd_folder import save_clip
from transformers import CLIPModel, CLIPProcessor

ROOT = Path(__file__).parents[1]


def test_compare_draws_all_methods_and_their_differences(model_folder, tmp_path):
    out = tmp_path / "new" / "grid.png"
    printed = invoke(
        "compare", "--model", model_folder, "--prompt", "a cat", "--prompt", "a dog", "--steps", 8,
        "--ratio", 0.5, "--differences", "--out", out,
    )  # fmt: skip
    for method in ("baseline", "baseline@4/", "tomesd r=0.5", "agentsd r=0.5"):
        assert method in printed
    assert "fast, each call: FFFfFfFf (8 calls: 5 full; 3 cached; 2 corrected)" in printed
    with Image.open(out) as image:
        width, height = image.size
    assert width > 2 * 160
    assert 9 * 160 < height < 10 * 168 + 60  # five rows of images, four of differences


def test_a_difference_is_drawn_four_times_as_strong():
    baseline, image = (Image.new("RGB", (2, 1), (100, 100, 100)) for _ in range(2))
    image.putpixel((1, 0), (90, 103, 255))
    [[same], [other], [drawn]], labels = with_differences([[baseline], [image]], ["baseline", "fast"])
    assert (same, other, labels[:2]) == (baseline, image, ["baseline", "fast"])
    assert [drawn.getpixel((x, 0)) for x in (0, 1)] == [(255, 255, 255), (215, 243, 0)]


def table(folder, model, photographs, *words):
    """Make a small table of AgentSD beside the baseline, or go on with it."""
    return invoke(
        "table", "--model", model, "--prompts", folder / "prompts.txt", "--reference", photographs,
        "--methods", "agentsd", "--ratios", 0.5, "--steps", 3, "--images", 5, "--batch-size", 2,
        "--samplers", "none", "--reference-steps", "none", *words, "--out", folder,
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(model_folder, photographs, tmp_path_factory):
    """The folder of a finished table."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "prompts.txt").write_text("a cat\na dog\n")
    words = ("--methods", "tomesd+deepcache", "--fewer-steps", 0.4)
    assert "distance of distributions" in table(folder, model_folder, photographs, *words)
    return folder


def test_a_table_has_a_row_for_each_method_and_a_floor(run):
    rows = {row["method"]: row for row in rows_of(run / "table.jsonl")}
    assert list(rows) == ["baseline", "baseline@1", "agentsd", "tomesd+deepcache", "real/real"]
    baseline, fewer, agent, *_ = rows.values()
    assert fewer["macs"] < agent["macs"] < baseline["macs"]
    assert fewer["baseline_distance"] > 0 < fewer["speedup"]
    assert (baseline["speedup"], baseline["ratio"]) == (1.0, None)
    assert (agent["ratio"], agent["backend"]) == (0.5, "sdpa")
    assert agent["fd_change"] == pytest.approx(agent["fd"] - baseline["fd"])
    assert agent["psnr"] > 20
    markdown = (run / "table.md").read_text()
    assert "| agentsd | 0.5 |" in markdown
    assert "too few to judge" in markdown
    assert not re.search(r"\d ≈|\d ± \d", markdown)


def test_a_run_says_its_settings_and_who_made_it(run):
    run_file = json.loads((run / "run.json").read_text())
    facts = run_file["results"]["table"]
    assert facts["settings"]["steps"] == 3
    assert {"torch", "diffusers", "tomesd", "DeepCache"} <= set(facts["versions"])
    (maker,) = run_file["environments"].values()
    assert maker.items() <= facts.items()
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    assert (maker["commit"], maker["threads"]) == (commit, torch.get_num_threads())


def test_a_second_run_goes_on_with_another_ratio(run, model_folder, photographs, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    table(folder, model_folder, photographs, "--ratios", 0.25, "--fewer-steps", "none")
    old = rows_of(run / "table.jsonl")[2]
    again = {row.get("label"): row for row in rows_of(folder / "table.jsonl")}
    for figure in ("fd", "seconds", "speedup"):
        assert again["agentsd r=0.5"][figure] == old[figure]
    # another process made it at another time: its speed-up is over the baseline's batches timed again
    assert again["agentsd r=0.25"]["speedup_batches"] == 2  # and one of a single image


def test_a_report_is_one_page_without_links(run):
    invoke("report", run, "--images", 2)
    page = (run / "report.html").read_text()
    assert page.count("data:image/webp;base64,") == 2 * 4
    assert page.count("<svg") == 1
    assert not re.findall(r'(?:src|href)="(?!data:|#)', page)
    assert "agentsd r=0.5" in page


@pytest.fixture(scope="module")
def clip_folder(tokenizer, tmp_path_factory):
    """A tiny CLIP model on disk."""
    return save_clip(tmp_path_factory.mktemp("clip"), tokenizer)


def test_clip_score_is_the_cosine_of_the_embeddings(clip_folder, photographs):
    images = [Image.open(path) for path in sorted(photographs.glob("*.png"))]
    prompts = ["a cat"] * 5 + ["a dog"] * 4
    scores = ClipScore(str(clip_folder), torch.device("cpu"))(images, prompts)
    model, processor = (kind.from_pretrained(clip_folder) for kind in (CLIPModel, CLIPProcessor))
    inputs = processor(text=prompts[5:6], images=images[5:6], return_tensors="pt")
    with torch.no_grad():
        logit = model.eval()(**inputs).logits_per_image / model.logit_scale.exp()
    assert scores.shape == (9,)
    assert scores[5] == pytest.approx(max(0.0, 100 * float(logit)), rel=1e-4, abs=1e-4)


def test_clip_score_in_the_table(model_folder, clip_folder, tmp_path):
    printed = invoke(
        "table", "--model", model_folder, "--methods", "agentsd", *ALONE, "--clip", clip_folder, "--steps", 2,
        "--images", 2, "--out", tmp_path,
    )  # fmt: skip
    assert "CLIP score" in (tmp_path / "table.md").read_text()
    assert "real/real" not in printed


def test_fid_of_a_folder_and_itself_is_zero(photographs, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    printed = invoke("fid", photographs, photographs, "--features", "efficientnet-lite0")
    assert "9 / 9" in printed
    assert re.search(r" -?0\.000 ", printed)
