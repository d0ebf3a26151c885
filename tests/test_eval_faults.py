"""What people do to files and settings: told in one line before any long work, or made good."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agentsd_eval import presets, run_file
from agentsd_eval.cli import main
from agentsd_eval.errors import EvalError
from agentsd_eval.files import read_lines
from agentsd_eval.images.generate import fingerprint, generate
from agentsd_eval.images.methods import parse_method
from agentsd_eval.images.prompts import from_prompts, unknown_words
from agentsd_eval.images.store import Store
from agentsd_eval.pages.report import write_report
from agentsd_eval.pages.rows import Column, figure, to_markdown
from agentsd_eval.presets import load_settings
from agentsd_eval.quality.features import Network, features_of
from agentsd_eval.research.settings import ValidationSettings
from agentsd_eval.settings import RunSettings
from click.testing import CliRunner
from PIL import Image

SETTINGS = RunSettings(steps=1, batch_size=2, scheduler="model", fewer_steps=())
IMAGES = from_prompts(["a cat"], 2, 0)
BASELINE = parse_method("baseline", None, SETTINGS)


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "run.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


BOMB = "a0: &a0 [x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"model: \xff\xfe", "run.yaml is not UTF-8 text"),
        (b"model: \x00", "run.yaml is not valid YAML"),
        (BOMB, r"not valid YAML: (.|\n)*aliases \(\*name\) are not read"),
        ("[" * 5000, "nested too deeply"),
        ("x: " + "y" * 1_000_001, "is larger than 1,000,000 bytes"),
        ("named: [1]", r"named = \[1\]: pass `name: value` lines"),
        ("named: {1: {k: 1}}", "named.*1"),
        ("named: {mine: 5}", "named.mine"),
        ("named: {mine: {recipe: 5}}", "write what a recipe's file holds"),
        ("named: {agentsd: {k: 0.1}}", "'agentsd' is a method already: choose another name"),
        ("named: {deepcache-7: {k: 0.1}}", "'deepcache-7' is a method already"),
        ("named: {baseline: {k: 0.1}}", "'baseline' is a method already"),
        ("named: {m@3: {k: 0.1}}", "is empty or holds a line break or one of"),
        ("named: {mine: {k: [1]}}", "k=\\[1\\] is a list"),
        ("model: [" + "x, " * 500 + "]", r"model = .{1,125}\.\.\.: pass text"),
        ("base: gone.yaml", "can't read the configuration .*gone.yaml"),
        ("base: run.yaml", r"base: run.yaml -> run.yaml goes in a circle"),
        ("base: [1]", r"base = \[1\]: write the name of a file beside it"),
        ("seed: 99999999999999999999", "seed = 9+: pass less than"),
        ("steps: 1001", "steps = 1001: pass 1000 or less"),
        ("steps: " + "9" * 5000, "not valid YAML"),
        ("fewer_steps: [1.5]", "fewer_steps = 1.5: pass shares of the steps"),
    ],
)
def test_odd_settings_are_one_message(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(EvalError, match=message) as caught:
        load_settings(RunSettings, write(tmp_path, text), {})
    assert len(str(caught.value)) < 1500


def test_prompts_that_are_no_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_bytes(b"a cat\n\xff\n")
    with pytest.raises(EvalError, match=r"prompts.txt is not UTF-8 text \(invalid start byte at byte 6\)"):
        read_lines(tmp_path / "prompts.txt")


def test_a_setting_has_one_name(tmp_path: Path) -> None:
    """In YAML its key, on the command line that with dashes; errors say it as it was given."""
    path = write(tmp_path, "guidance_scale: 3\nsteps: 0\n")
    for given, name in (({}, "steps = 0"), ({"steps": "-1"}, "--steps = -1")):
        with pytest.raises(EvalError, match=rf"(^|: ){name}: pass 1 or more"):
            load_settings(RunSettings, path, given)
    with pytest.raises(EvalError) as told:
        load_settings(ValidationSettings, None, {"chain_steps": [0]})
    assert str(told.value) == "--chain-steps = 0: pass 1 or more"


def test_a_presets_base_is_read_first_and_its_files_are_found(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "classes.txt").write_text("kite\n")
    (tmp_path / "below" / "base.yaml").write_text("classes: classes.txt\nsteps: 7\nseed: 3\n")
    settings = load_settings(RunSettings, write(tmp_path, "base: below/base.yaml\nsteps: 9\n"), {})
    assert (settings.steps, settings.seed) == (9, 3)
    assert settings.classes == tmp_path / "below" / "classes.txt"


def test_a_base_that_is_not_beside_the_file_is_a_preset(tmp_path: Path) -> None:
    path = write(tmp_path, "base: table11.yaml\nsteps: 9\n")
    assert load_settings(RunSettings, path, {}).methods[0] == "k-0"
    (tmp_path / "table11.yaml").write_text("methods: [todo]\n")  # one beside it comes first
    assert load_settings(RunSettings, path, {}).methods == ("todo",)


def test_presets_are_found_by_name_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_settings(RunSettings, "table13", {}).out == Path("agentsd-results/table13")
    assert load_settings(RunSettings, "table10", {}).classes.read_text().startswith("tench\n")  # type: ignore[union-attr]
    with pytest.raises(EvalError, match="no such file or preset; did you mean --config table10"):
        load_settings(RunSettings, "tables10", {})
    with pytest.raises(EvalError, match=r"configs/table10.yaml: no such file .* --config table10"):
        load_settings(RunSettings, "configs/table10.yaml", {})
    (tmp_path / "table10").write_text("steps: 3\n")  # a file of one's own comes first
    assert load_settings(RunSettings, "table10", {}).steps == 3
    assert {"table13", "latency_sd15_gpu"} <= set(presets.presets())
    assert not {"demo_model", "dreambooth_sd15"} & set(presets.presets())


@pytest.mark.parametrize("content", ["[]", "5", '{"steps": 3}', "{", '{"format": 1}'])
def test_a_folder_that_is_no_run_of_ours_is_refused(pipe: Any, tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(EvalError, match=r"run.json"):
        Store(tmp_path).claim(fingerprint(pipe, IMAGES, SETTINGS), {})
    assert (tmp_path / "run.json").read_text() == content


def test_a_run_knows_its_makers_and_goes_on_with_other_threads_and_batches(pipe: Any, tmp_path: Path) -> None:
    store, facts = Store(tmp_path), fingerprint(pipe, IMAGES, SETTINGS)
    for maker in ({"commit": "a"}, {"commit": "a"}, {"commit": "b"}):
        store.claim(facts, maker)
    assert run_file.read(tmp_path)["environments"] == {"1": {"commit": "a"}, "2": {"commit": "b"}}
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        store.claim(fingerprint(pipe, IMAGES, SETTINGS.model_copy(update={"batch_size": 5})), {"commit": "b"})
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "line",
    [
        b"[]", b"5", b"null", b"\xff\xfe", b'{"index": 0}',
        b'{"index": "0", "seed": 0, "prompt": "", "sha256": "", "batch": 0, "batch_images": 1, "seconds": 1, '
        b'"cpu_seconds": 1, "session": "x", "maker": "1"}',
        b'{"index": 0, "seed": 0, "prompt": "", "sha256": "", "batch": 0, "batch_images": 0, "seconds": 0, '
        b'"cpu_seconds": 0, "session": "x", "maker": "1"}',
    ],
)  # fmt: skip
def test_odd_lines_of_a_manifest_are_passed_over(pipe: Any, tmp_path: Path, line: bytes) -> None:
    store = Store(tmp_path)
    generate(pipe, store, [BASELINE], IMAGES, SETTINGS, _alone(), lambda count: None)
    times = store.timings(BASELINE)
    manifest = store.path(BASELINE, 0).with_name("manifest-0.jsonl")
    manifest.write_bytes(line + b"\n" + manifest.read_bytes())
    assert set(store.intact(BASELINE)) == {0, 1}
    assert store.timings(BASELINE) == times


def _alone() -> Any:
    from agentsd_eval.images.generate import Share

    return Share()


def test_features_that_do_not_fit_on_the_disk_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network("means", 8, lambda pixels: pixels.mean((2, 3)))

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(EvalError, match=r"the disk is full: .* run the same command again"):
        features_of(network, [Image.new("RGB", (8, 8))], tmp_path / "features")
    monkeypatch.undo()
    assert not list(tmp_path.rglob("*.np*"))
    assert not [path for path in tmp_path.rglob(".*") if path.is_file()]
    kept = features_of(network, [Image.new("RGB", (8, 8), "white")], tmp_path / "features")
    assert np.array_equal(kept, [[255, 255, 255]])


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("table", "stopped; the same command goes on from here"),
        ("compare", "stopped; the same command begins anew"),
    ],
)
def test_ctrl_c_says_how_to_go_on(command: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"agentsd_eval.studies.{command}.command", interrupted)
    result = CliRunner().invoke(main, [command])
    assert (result.exit_code, result.output.strip()) == (130, said)


def test_words_that_the_model_was_never_taught_are_found() -> None:
    class Words:
        def get_vocab(self) -> dict[str, int]:
            return {"photo</w>": 1, "xylo": 2, "a</w>": 3}

    prompts = ["a photo of a Xylophone, blue", "a zyzzyva or a xylophone"]
    found = unknown_words(Words(), prompts)
    assert [word for word in found if word not in ("blue", "or")] == ["xylophone", "zyzzyva"]


def test_a_run_of_two_images_is_json_without_repeats(pipe: Any, tmp_path: Path) -> None:
    run_file.update(tmp_path, results={"table": {"a": 1}})
    run_file.update(tmp_path, results={"latency": {"a": 2}}, images={"steps": 3})
    assert json.loads((tmp_path / "run.json").read_text()) == {
        "format": run_file.FORMAT,
        "results": {"table": {"a": 1}, "latency": {"a": 2}},
        "images": {"steps": 3},
    }


def test_a_missing_package_is_told_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_fid", None)
    work = "agentsd_eval.studies.table.load_pipeline"
    monkeypatch.setattr(work, lambda *args, **kwargs: pytest.fail("began"))
    result = CliRunner().invoke(main, ["table", "--features", "inception"])
    assert result.exit_code == 2
    assert "pip install pytorch-fid==0.3.0, or use --features efficientnet-lite0" in result.output


def test_a_method_that_the_sampler_does_not_suit_is_told_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentsd_eval.studies.table.load_real", lambda *args: pytest.fail("began"))
    asked = ["table", "--methods", "deepcache-2", "--scheduler", "plms", "--steps", "25", "--out"]
    result = CliRunner().invoke(main, [*asked, str(tmp_path)])
    assert result.exit_code == 2
    assert "use --scheduler ddim" in " ".join(result.output.split())
    assert not list(tmp_path.iterdir())


RESULTS = Path(__file__).parents[1] / "eval/results/benchmark-128-demo"
DAMAGE = {
    "a line cut": lambda folder: _edit(folder / "table.jsonl", lambda text: text[: len(text) // 2]),
    "no rows": lambda folder: (folder / "table.jsonl").unlink(),
    "rows of another kind": lambda folder: (folder / "table.jsonl").write_text("[1, 2]\n"),
    "a row without its method": lambda folder: _edit(
        folder / "table.jsonl", lambda text: text.replace('"method"', '"way"')
    ),
    "a figure that is none": lambda folder: _edit(
        folder / "table.jsonl", lambda text: text.replace('"speedup": 1', '"speedup": "x1')
    ),
    "bytes that are no text": lambda folder: (folder / "table.jsonl").write_bytes(b"\xff\xfe\x00"),
    "settings gone": lambda folder: _edit(
        folder / "run.json", lambda text: text.replace('"settings"', '"put"')
    ),
    "results that are a list": lambda folder: _edit(
        folder / "run.json", lambda text: json.dumps(json.loads(text) | {"results": {"table": [1]}})
    ),
    "a key that leads outside": lambda folder: _edit(
        folder / "table.jsonl", lambda text: text.replace('"key": "', '"key": "../../')
    ),
}


def _edit(path: Path, change: Any) -> None:
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_folder_is_told_in_one_line(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(RESULTS, folder)
    DAMAGE[damage](folder)
    with pytest.raises(EvalError, match=r"the results of table in .* can't be read") as told:
        write_report(folder, 2)
    assert "\n" not in str(told.value)
    assert not (folder / "report.html").exists()


def test_a_methods_name_is_escaped_in_markdown() -> None:
    columns = [Column("method", figure("method", "")), Column("speed-up", figure("speedup", ".2f"))]
    text = to_markdown([{"method": "a | b\n<img src=x>", "speedup": 1.0}], columns)
    assert text.splitlines()[2] == "| a \\| b &lt;img src=x> | 1.00 |"
