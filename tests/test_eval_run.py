"""Runs: seeds, resuming, damage, a full disk, several processes; all end in the same table."""

import errno
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from agentsd_eval import run_file
from agentsd_eval.errors import EvalError
from agentsd_eval.images.generate import Share, fingerprint, generate
from agentsd_eval.images.methods import parse_method
from agentsd_eval.images.models import scheduler_like
from agentsd_eval.images.prompts import from_prompts
from agentsd_eval.images.sampling import Seconds, sample, warm_up
from agentsd_eval.images.store import Store
from agentsd_eval.pages import quality_table
from agentsd_eval.settings import RunSettings
from agentsd_eval.studies import table
from commands import rows_of
from logs import warned
from PIL import Image

IMAGES = from_prompts(["a cat", "a dog"], 7, 10)
ALONE = {"scheduler": "model", "fewer_steps": (), "samplers": ()}
NAMES = ("baseline", "tomesd", "agentsd")
SETTINGS = RunSettings(methods=NAMES, steps=3, batch_size=3, ratios=(0.5,), **ALONE)
MAKER = {"commit": "a"}
METHODS = table.table_methods(SETTINGS)


class Killed(Exception):
    pass


def fill(pipe, folder, share=Share(), stop_after=10**9, settings=SETTINGS, maker=MAKER):  # noqa: B008
    """Run to the end, or as far as `stop_after` batches."""
    ticks = []

    def tick(count):
        ticks.append(count)
        if len(ticks) > stop_after:
            raise Killed

    store = Store(folder, share.rank)
    store.claim(fingerprint(pipe, IMAGES, settings), maker)
    generate(pipe, store, METHODS, IMAGES, settings, share, tick)
    return store


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*.png"))}


@pytest.fixture(scope="module")
def whole(make_pipeline, tmp_path_factory):
    """The images of a run that was never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    fill(make_pipeline(), folder)
    return contents(folder)


def test_a_run_has_every_image_of_every_method(whole):
    assert len(whole) == 3 * 7
    assert len(set(whole.values())) == 3 * 7


@pytest.mark.parametrize("stop_after", [0, 4])
def test_a_killed_run_resumes_to_the_same_images(pipe, tmp_path, whole, stop_after):
    with pytest.raises(Killed):
        fill(pipe, tmp_path, stop_after=stop_after)
    fill(pipe, tmp_path)
    assert contents(tmp_path) == whole


def test_a_finished_run_makes_nothing_again(pipe, tmp_path, monkeypatch):
    fill(pipe, tmp_path)
    monkeypatch.setattr("agentsd_eval.images.generate.sample", lambda *args: pytest.fail("made again"))
    fill(pipe, tmp_path)


def test_a_row_that_joins_later_has_baseline_timed_again(pipe, tmp_path, monkeypatch):
    monkeypatch.setattr("agentsd_eval.images.generate.RETIMED", 2)
    fill(pipe, tmp_path)
    whole = contents(tmp_path)
    shutil.rmtree(Store(tmp_path).path(METHODS[1], 0).parent)
    store = fill(pipe, tmp_path, maker={"commit": "b"})
    assert contents(tmp_path) == whole
    baseline, later, first = (set(store.timings(method)) for method in METHODS)
    (session,) = {session for _, session in later}
    assert baseline & later == {(0, session), (1, session)}  # of three batches
    assert baseline & first == first
    assert len(store.intact(METHODS[0])) == 7
    assert [store.makers(method)["makers"] for method in METHODS] == ["1", "2", "1"]


def test_that_no_step_of_a_warm_up_is_early_goes_unsaid(pipe, caplog):
    settings = SETTINGS.model_copy(update={"steps": 2, "named": {"late": {"early_frac": 0.2}}})
    method = parse_method("late", None, settings)
    warm_up(pipe, method, IMAGES[:1], settings)
    assert "agentsd: " not in caplog.text
    with warned("no early step"):
        sample(pipe, method, IMAGES[:1], settings)


def test_images_of_one_colour_are_refused(pipe, monkeypatch):
    """Latents that are not numbers decode to black."""
    torch.nn.init.constant_(pipe.unet.conv_out.bias, torch.nan)
    with pytest.raises(EvalError, match=r"baseline, seed 10: the image is of one colour"):
        sample(pipe, METHODS[0], IMAGES[:1], SETTINGS)


def test_damage_is_found_and_made_again(pipe, tmp_path, whole):
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


def test_a_run_goes_on_with_another_batch(pipe, tmp_path):
    with pytest.raises(Killed):
        fill(pipe, tmp_path, stop_after=3)
    store = fill(pipe, tmp_path, settings=SETTINGS.model_copy(update={"batch_size": 2}))
    assert all(set(store.intact(method)) == set(range(7)) for method in METHODS)
    baseline, later = (store.timings(METHODS[i]) for i in (0, 1))
    assert {entry.batch_images for entry in baseline.values()} == {1, 2, 3}
    # of each new batch the baseline has a time by the same number and of the same size
    new = [key for key in later if later[key].batch_images == 2]
    assert new
    assert all(baseline[key].batch_images == 2 for key in new)


@pytest.mark.parametrize(("images", "batches"), [(4, [2, 2]), (24, [8, 8, 8]), (32, [8, 8, 8, 8])])
def test_methods_take_turns_where_one_batch_would_do(images, batches, tmp_path, monkeypatch):
    """A slow moment is then not one method's alone."""
    order = []

    def noted(pipe, method, batch, settings):
        order.append((method.name, len(batch)))
        return [Image.new("RGB", (8, 8))] * len(batch), Seconds(1.0, 1.0)

    monkeypatch.setattr("agentsd_eval.images.generate.sample", noted)
    monkeypatch.setattr("agentsd_eval.images.generate.warm_up", lambda *args: None)
    settings, specs = RunSettings(batch_size=8), from_prompts(["a cat"], images, 0)
    methods = [parse_method(name, None, settings) for name in ("baseline", "fast")]
    generate(None, Store(tmp_path), methods, specs, settings, Share(), lambda count: None)
    assert order == [(name, size) for size in batches for name in ("baseline", "fast")]


def test_processes_share_the_work(pipe, tmp_path, whole):
    fill(pipe, tmp_path, Share(0, 2))
    assert 0 < len(contents(tmp_path)) < len(whole)
    store = fill(pipe, tmp_path, Share(1, 2))
    assert contents(tmp_path) == whole
    assert all(len(store.intact(method)) == 7 for method in METHODS)


def test_a_folder_of_another_run_is_refused(pipe, tmp_path):
    Store(tmp_path).claim(fingerprint(pipe, IMAGES, SETTINGS), MAKER)
    more = SETTINGS.model_copy(update={"steps": 4})
    with pytest.raises(EvalError, match=r"steps: 3 there, 4 now\); choose another --out"):
        Store(tmp_path).claim(fingerprint(pipe, IMAGES, more), MAKER)


@pytest.mark.parametrize("content", ["[]", "5", '{"steps": 3}', "{", '{"format": 1}'])
def test_a_folder_that_is_no_run_of_ours_is_refused(pipe, tmp_path, content):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(EvalError, match=r"run.json"):
        Store(tmp_path).claim(fingerprint(pipe, IMAGES, SETTINGS), {})
    assert (tmp_path / "run.json").read_text() == content


def test_a_run_knows_its_makers_and_goes_on_with_other_threads(pipe, tmp_path, monkeypatch):
    store, facts = Store(tmp_path), fingerprint(pipe, IMAGES, SETTINGS)
    for commit in "aab":
        store.claim(facts, {"commit": commit})
    assert run_file.read(tmp_path)["environments"] == {"1": {"commit": "a"}, "2": {"commit": "b"}}
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    store.claim(fingerprint(pipe, IMAGES, SETTINGS), {"commit": "b"})


def test_what_run_json_holds_stays_when_more_comes(tmp_path):
    run_file.update(tmp_path, results={"table": {"a": 1}})
    run_file.update(tmp_path, results={"latency": {"a": 2}}, images={"steps": 3})
    assert json.loads((tmp_path / "run.json").read_text()) == {
        "format": run_file.FORMAT,
        "results": {"table": {"a": 1}, "latency": {"a": 2}},
        "images": {"steps": 3},
    }


WHOLE = {
    "index": 0, "seed": 0, "prompt": "", "sha256": "", "batch": 0, "batch_images": 1, "seconds": 1,
    "cpu_seconds": 1, "session": "x", "maker": "1", "timed_by": "1",
}  # fmt: skip
ODD = [b"[]", b"5", b"null", b"\xff\xfe", b'{"index": 0}']
ODD += [json.dumps(WHOLE | change).encode() for change in ({"index": "0"}, {"batch_images": 0, "seconds": 0})]


def test_odd_lines_of_a_manifest_are_passed_over(pipe, tmp_path):
    store = fill(pipe, tmp_path)
    entries, times = store.intact(METHODS[0]), store.timings(METHODS[0])
    manifest = store.path(METHODS[0], 0).with_name("manifest-0.jsonl")
    manifest.write_bytes(b"\n".join(ODD) + b"\n" + manifest.read_bytes())
    assert store.intact(METHODS[0]) == entries
    assert store.timings(METHODS[0]) == times


def test_a_full_disk_loses_nothing(pipe, tmp_path, whole, monkeypatch):
    replace, count = Path.replace, 0

    def full(self, target):
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
def test_an_image_hardly_depends_on_its_batch(pipe, scheduler):
    pipe.scheduler = scheduler_like(pipe.scheduler, scheduler)
    for method in METHODS[0], METHODS[2]:  # tomesd's random cells belong to the batch
        three, _ = sample(pipe, method, IMAGES[:3], SETTINGS)
        one, _ = sample(pipe, method, IMAGES[1:2], SETTINGS)
        difference = np.array(three[1], dtype=float) - np.array(one[0], dtype=float)
        assert np.abs(difference).max() <= 2


def test_a_row_goes_by_the_users_own_name_or_by_its_settings():
    own = {"few": {"mode": "fast"}}
    settings = RunSettings(ratios=(0.5,), named=own, fewer_steps=(), samplers=())
    methods = table.table_methods(settings.model_copy(update={"methods": ["tomesd", "agentsd", "few"]}))
    labels = [quality_table.row_label(table.identity(method)) for method in methods]
    assert labels == ["baseline", "tomesd r=0.5", "agentsd r=0.5", "few"]


QUALITY = ("method", "ratio", "fd", "kid", "kid_error", "psnr", "baseline_distance")


def quality(folder):
    return [[row.get(key) for key in QUALITY] for row in rows_of(folder / "table.jsonl")]


@pytest.fixture
def command(model_folder, photographs):
    """A small table with real images, without the folder of --out."""
    more = "--steps 2 --images 6 --batch-size 2 --methods agentsd --fewer-steps 0.5 --samplers none"
    words = ["table", "--model", model_folder, "--reference", str(photographs), *more.split()]
    return [*words, "--reference-steps", "none", "--out"]


@pytest.mark.slow
def test_a_run_killed_with_minus_9_ends_with_the_same_table(command, tmp_path):
    program = [sys.executable, "-m", "agentsd_eval.cli", *command]
    subprocess.run([*program, str(tmp_path / "whole")], check=True, capture_output=True, timeout=300)
    kills = 0
    for wanted in (1, 7, 12, None):  # images on disk when it is killed
        process = subprocess.Popen([*program, str(tmp_path / "killed")], stdout=subprocess.DEVNULL)
        while process.poll() is None:
            if wanted and len(list((tmp_path / "killed").rglob("*.png"))) >= wanted:
                process.kill()
                kills += process.wait() == -signal.SIGKILL
            time.sleep(0.01)
    assert (kills, process.returncode) == (3, 0)
    assert contents(tmp_path / "killed" / "images") == contents(tmp_path / "whole" / "images")
    assert quality(tmp_path / "killed") == quality(tmp_path / "whole")


@pytest.mark.slow
def test_two_processes_give_the_same_table(command, tmp_path):
    # what `accelerate launch` runs on several GPUs; on CPUs alone it asks for MPI
    launch = ["torch.distributed.run", "--nproc_per_node", "2", "-m", "agentsd_eval.cli"]
    for name, program in (("one", ["agentsd_eval.cli"]), ("two", launch)):
        words = [sys.executable, "-m", *program, *command, str(tmp_path / name)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    assert quality(tmp_path / "one") == quality(tmp_path / "two")
    assert len(list((tmp_path / "two").rglob("manifest-1.jsonl"))) == 3
    [result] = json.loads((tmp_path / "two" / "run.json").read_text())["results"].values()
    assert result["command"].startswith("accelerate launch --num_processes 2 -m agentsd_eval.cli table --m")
