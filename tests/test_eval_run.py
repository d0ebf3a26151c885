"""Runs: seeds, resuming, damage, a full disk, several processes; all end in the same table."""

from __future__ import annotations

import csv
import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agentsd_demo.scenes import Triple
from agentsd_eval import files
from agentsd_eval.errors import EvalError
from agentsd_eval.images.generate import Share, fingerprint, generate
from agentsd_eval.images.methods import parse_method
from agentsd_eval.images.models import scheduler_like
from agentsd_eval.images.prompts import (
    SHIPPED,
    from_classes,
    from_prompts,
    from_triples,
    specs_of,
    specs_to_show,
)
from agentsd_eval.images.sampling import sample, warm_up
from agentsd_eval.images.store import Store
from agentsd_eval.pages import quality_table
from agentsd_eval.pages import rows as results
from agentsd_eval.settings import CompareSettings, RunSettings
from agentsd_eval.studies import table
from logs import warned

IMAGES = from_prompts(["a cat", "a dog"], 7, 10)
SETTINGS = RunSettings(
    methods=("baseline", "tomesd", "agentsd"),
    steps=3,
    batch_size=3,
    ratios=(0.5,),
    scheduler="model",
    fewer_steps=(),
    samplers=(),
)
MAKER = {"commit": "a"}
METHODS = table.table_methods(SETTINGS)


class Killed(Exception):
    pass


def fill(pipe: Any, folder: Path, share: Share | None = None, stop_after: int = 10**9) -> Store:
    """Run to the end, or as far as `stop_after` batches."""
    ticks = 0

    def tick(count: int) -> None:
        nonlocal ticks
        ticks += 1
        if ticks > stop_after:
            raise Killed

    share = share or Share()
    store = Store(folder, share.rank)
    store.claim(fingerprint(pipe, IMAGES, SETTINGS), MAKER)
    generate(pipe, store, METHODS, IMAGES, SETTINGS, share, tick)
    return store


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*.png"))}


@pytest.fixture(scope="module")
def whole(make_pipeline: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The images of a run that was never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    fill(make_pipeline(), folder)
    return contents(folder)


def test_a_run_has_every_image_of_every_method(whole: dict[str, bytes]) -> None:
    assert len(whole) == 3 * 7
    assert len(set(whole.values())) == 3 * 7


@pytest.mark.parametrize("stop_after", [0, 4])
def test_a_killed_run_resumes_to_the_same_images(
    pipe: Any, tmp_path: Path, whole: dict[str, bytes], stop_after: int
) -> None:
    with pytest.raises(Killed):
        fill(pipe, tmp_path, stop_after=stop_after)
    fill(pipe, tmp_path)
    assert contents(tmp_path) == whole


def test_a_finished_run_makes_nothing_again(pipe: Any, tmp_path: Path, monkeypatch: Any) -> None:
    fill(pipe, tmp_path)
    monkeypatch.setattr(
        "agentsd_eval.images.generate.sample", lambda *args, **kwargs: pytest.fail("made again")
    )
    fill(pipe, tmp_path)


def test_a_row_that_joins_later_has_baseline_timed_again(pipe: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("agentsd_eval.images.generate.RETIMED", 2)
    whole = contents(fill(pipe, tmp_path).folder)
    path = Store(tmp_path).path(METHODS[1], 0).parent
    shutil.rmtree(path)
    store = fill(pipe, tmp_path)
    assert contents(tmp_path) == whole
    baseline, later, first = (set(store.timings(METHODS[i])) for i in (0, 1, 2))
    (session,) = {session for _, session in later}
    assert baseline & later == {(0, session), (1, session)}  # of three batches
    assert baseline & first == first
    assert len(store.intact(METHODS[0])) == 7


def test_that_no_step_of_a_warm_up_is_early_goes_unsaid(pipe: Any, caplog: pytest.LogCaptureFixture) -> None:
    settings = SETTINGS.model_copy(update={"steps": 2, "named": {"late": {"early_frac": 0.2}}})
    method = parse_method("late", None, settings)
    warm_up(pipe, method, IMAGES[:1], settings)
    assert "agentsd: " not in caplog.text
    with warned("no early step"):
        sample(pipe, method, IMAGES[:1], settings)


def test_a_row_says_who_made_its_images(pipe: Any, tmp_path: Path) -> None:
    fill(pipe, tmp_path)
    shutil.rmtree(Store(tmp_path).path(METHODS[1], 0).parent)
    store = Store(tmp_path)
    store.claim(fingerprint(pipe, IMAGES, SETTINGS), {"commit": "b"})
    generate(pipe, store, METHODS, IMAGES, SETTINGS, Share(), lambda count: None)
    assert [store.makers(method)["makers"] for method in METHODS] == ["1", "2", "1"]


def test_images_of_one_colour_are_refused(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Latents that are not numbers decode to black."""
    torch.nn.init.constant_(pipe.unet.conv_out.bias, torch.nan)
    with pytest.raises(EvalError, match=r"baseline, seed 10: the image is of one colour"):
        sample(pipe, METHODS[0], IMAGES[:1], SETTINGS)


def test_damage_is_found_and_made_again(pipe: Any, tmp_path: Path, whole: dict[str, bytes]) -> None:
    store = fill(pipe, tmp_path)
    paths = [store.path(METHODS[i], index) for i, index in ((0, 1), (1, 6), (2, 3))]
    paths[0].unlink()
    paths[1].write_bytes(paths[1].read_bytes()[:-20])
    flipped = bytearray(paths[2].read_bytes())
    flipped[len(flipped) // 2] ^= 1
    paths[2].write_bytes(flipped)
    manifest = paths[1].with_name("manifest-0.jsonl")
    manifest.write_bytes(manifest.read_bytes()[:-40])  # and a line cut off by a kill
    fill(pipe, tmp_path)
    assert contents(tmp_path) == whole
    assert all(len(store.intact(method)) == 7 for method in METHODS)


def test_a_run_goes_on_with_another_batch(pipe: Any, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        fill(pipe, tmp_path, stop_after=3)
    smaller = SETTINGS.model_copy(update={"batch_size": 2})
    store = Store(tmp_path)
    store.claim(fingerprint(pipe, IMAGES, smaller), MAKER)
    generate(pipe, store, METHODS, IMAGES, smaller, Share(), lambda count: None)
    assert all(set(store.intact(method)) == set(range(7)) for method in METHODS)
    baseline, later = (store.timings(METHODS[i]) for i in (0, 1))
    assert {entry.batch_images for entry in baseline.values()} == {1, 2, 3}
    # of each new batch the baseline has a time by the same number and of the same size
    new = [key for key in later if later[key].batch_images == 2]
    assert new
    assert all(baseline[key].batch_images == 2 for key in new)


def test_processes_share_the_work(pipe: Any, tmp_path: Path, whole: dict[str, bytes]) -> None:
    fill(pipe, tmp_path, Share(0, 2))
    assert 0 < len(contents(tmp_path)) < len(whole)
    store = fill(pipe, tmp_path, Share(1, 2))
    assert contents(tmp_path) == whole
    assert all(len(store.intact(method)) == 7 for method in METHODS)


def test_a_folder_of_another_run_is_refused(pipe: Any, tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.claim(fingerprint(pipe, IMAGES, SETTINGS), MAKER)
    more = SETTINGS.model_copy(update={"steps": 4})
    with pytest.raises(EvalError, match=r"steps: 3 there, 4 now\); choose another --out"):
        store.claim(fingerprint(pipe, IMAGES, more), MAKER)
    torch.nn.init.zeros_(pipe.unet.conv_in.weight)
    with pytest.raises(EvalError, match="unet_digest: "):
        store.claim(fingerprint(pipe, IMAGES, SETTINGS), MAKER)


def test_a_full_disk_loses_nothing(
    pipe: Any, tmp_path: Path, whole: dict[str, bytes], monkeypatch: Any
) -> None:
    replace, count = Path.replace, 0

    def full(self: Path, target: Path) -> Path:
        nonlocal count
        count += 1
        if count > 8:
            raise OSError(errno.ENOSPC, "No space left on device")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(EvalError, match=r"the disk is full: .* run the same command again"):
        fill(pipe, tmp_path)
    monkeypatch.undo()
    assert not [path for path in tmp_path.rglob(".*") if path.is_file()]
    assert len(contents(tmp_path)) == 7  # of eight files, one is run.json
    fill(pipe, tmp_path)
    assert contents(tmp_path) == whole


@pytest.mark.parametrize("scheduler", ["model", "ddim", "ddpm", "euler", "dpm++", "dpm++karras"])
def test_an_image_hardly_depends_on_its_batch(pipe: Any, scheduler: str) -> None:
    pipe.scheduler = scheduler_like(pipe.scheduler, scheduler)
    for method in METHODS[0], METHODS[2]:  # tomesd's random cells belong to the batch
        three, _ = sample(pipe, method, IMAGES[:3], SETTINGS)
        one, _ = sample(pipe, method, IMAGES[1:2], SETTINGS)
        difference = np.array(three[1], dtype=float) - np.array(one[0], dtype=float)
        assert np.abs(difference).max() <= 2


def test_a_row_goes_by_the_users_own_name_or_by_its_settings() -> None:
    own = {"few": {"mode": "fast"}}
    settings = RunSettings(ratios=(0.5,), named=own, fewer_steps=(), samplers=())
    methods = table.table_methods(settings.model_copy(update={"methods": ["tomesd", "agentsd", "few"]}))
    labels = [quality_table.row_label(table.identity(method)) for method in methods]
    assert labels == ["baseline", "tomesd r=0.5", "agentsd r=0.5", "few"]


def test_prompts(tmp_path: Path) -> None:
    twice = from_classes(["a", "b"], 5)
    assert [(p.prompt[-2:], p.seed) for p in twice] == [("a.", 5), ("a.", 6), ("b.", 7), ("b.", 8)]
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(EvalError, match=r"empty.txt is empty"):
        specs_of(RunSettings(prompts=tmp_path / "empty.txt"))
    compared, tabled = CompareSettings(model="some/model"), RunSettings(model="some/model", images=6)
    shown = [[spec.prompt for spec in specs] for specs in (specs_to_show(compared), specs_of(tabled))]
    assert shown == [SHIPPED.read_text().splitlines()[:6]] * 2  # no emoji
    with pytest.raises(EvalError, match="not both"):
        specs_of(RunSettings(prompts=tmp_path / "empty.txt", classes=tmp_path / "empty.txt"))


def test_captions_are_spread_over_what_scenes_can_show() -> None:
    every = [Triple("kite", "3d", str(number)) for number in range(10)]
    twelve = from_triples(every, 12, 100)
    assert sorted(p.prompt[-1] for p in twelve[:10]) == list("0123456789")
    assert [p.prompt for p in twelve[10:]] == [p.prompt for p in twelve[:2]]
    assert [p.seed for p in twelve] == list(range(100, 112))
    hundred = [Triple("kite", "3d", str(number)) for number in range(100)]
    for images in (5, 20, 50):  # of 100 in a ring the next one is near: at most three even distances on
        fewer = from_triples(hundred, images, 100)
        assert fewer == from_triples(hundred, 60, 100)[:images]
        places = sorted(int(p.prompt.split()[-1]) for p in fewer)
        gaps = [(b - a) % 100 for a, b in zip(places, places[1:] + places[:1], strict=True)]
        assert max(gaps) <= 3 * 100 / images


def test_an_unwritable_place_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EvalError, match=r"can't write .*; choose another place with --out"):
        files.check_writable(tmp_path / "file" / "run" / "table.jsonl")


def test_equal_images_have_an_infinite_psnr_that_json_can_hold(tmp_path: Path) -> None:
    rows = [{"method": "a", "psnr": math.inf}]
    columns = [results.Column("method", results.figure("method", "")), results.Column("PSNR", PSNR)]
    results.write_rows(tmp_path, "table", rows, {"": columns}, {"command": "x"})
    back = json.loads((tmp_path / "table.jsonl").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert back["psnr"] == "inf"
    assert results.cells([back], columns) == results.cells(rows, columns) == [["a", "inf"]]


PSNR = results.figure("psnr", ".2f")
QUALITY = ("method", "ratio", "fd", "kid", "kid_error", "psnr", "baseline_distance")


def quality(folder: Path) -> list[list[str]]:
    with (folder / "table.csv").open(newline="") as file:
        return [[row[key] for key in QUALITY] for row in csv.DictReader(file)]


@pytest.fixture
def run_options(model_folder: str, photographs: Path, tmp_path: Path) -> list[str]:
    """Arguments of a small table with real images, without --out."""
    (tmp_path / "prompts.txt").write_text("a cat\na dog\n")
    options = ["table", "--model", model_folder, "--prompts", tmp_path / "prompts.txt", "--reference"]
    options += [photographs, "--steps", "2", "--images", "6", "--batch-size", "2", "--methods", "agentsd"]
    options += ["--fewer-steps", "0.5", "--samplers", "none", "--reference-steps", "none"]
    return list(map(str, options))


@pytest.mark.slow
def test_a_run_killed_with_minus_9_ends_with_the_same_table(run_options: list[str], tmp_path: Path) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-m", "agentsd_eval.cli", *run_options, "--out"]
    subprocess.run([*program, str(tmp_path / "whole")], env=env, check=True, capture_output=True, timeout=300)
    kills = 0
    for wanted in (1, 7, 12, None):  # images on disk when it is killed
        process = subprocess.Popen([*program, str(tmp_path / "killed")], env=env, stdout=subprocess.DEVNULL)
        while process.poll() is None:
            if wanted and len(list((tmp_path / "killed").rglob("*.png"))) >= wanted:
                process.kill()
                kills += process.wait() == -signal.SIGKILL
            time.sleep(0.01)
    assert kills == 3
    assert process.returncode == 0
    assert contents(tmp_path / "killed" / "images") == contents(tmp_path / "whole" / "images")
    assert quality(tmp_path / "killed") == quality(tmp_path / "whole")


@pytest.mark.slow
def test_two_processes_give_the_same_table(run_options: list[str], tmp_path: Path) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    # what `accelerate launch` runs on several GPUs; on CPUs alone it asks for MPI
    launch = ["torch.distributed.run", "--nproc_per_node", "2", "-m", "agentsd_eval.cli"]
    for name, program in (("one", ["agentsd_eval.cli"]), ("two", launch)):
        command = [sys.executable, "-m", *program, *run_options, "--out", str(tmp_path / name)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    assert quality(tmp_path / "one") == quality(tmp_path / "two")
    assert len(list((tmp_path / "two").rglob("manifest-1.jsonl"))) == 3
    [result] = json.loads((tmp_path / "two" / "run.json").read_text())["results"].values()
    assert result["command"].startswith("accelerate launch --num_processes 2 -m agentsd_eval.cli table --m")
