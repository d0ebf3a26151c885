"""What was found by trying: a cache that can't be written, long values, compiled memory, two real images."""

from __future__ import annotations

import io
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from accelerate import cpu_offload
from agentsd_eval.cli import main
from agentsd_eval.cost import latency
from agentsd_eval.cost.macs import macs
from agentsd_eval.cost.memory import memory_per_image
from agentsd_eval.errors import EvalError, shortened
from agentsd_eval.images import models
from agentsd_eval.images.generate import Share, generate
from agentsd_eval.images.methods import parse_method
from agentsd_eval.images.prompts import ImageSpec, specs_of
from agentsd_eval.images.sampling import Seconds, sample
from agentsd_eval.images.store import Store
from agentsd_eval.pages import quality_table
from agentsd_eval.pages.rows import progress
from agentsd_eval.quality import features
from agentsd_eval.quality.features import Network, features_of, image_files
from agentsd_eval.quality.gain import cost_at
from agentsd_eval.settings import LatencySettings, RunSettings
from agentsd_eval.studies import check, preflight, table
from click.testing import CliRunner
from PIL import Image
from rich.console import Console
from safetensors.torch import save_file


def test_a_cache_that_cannot_be_written_is_told_before_features(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    network = Network("means", 8, lambda pixels: pytest.fail("features were computed"))
    with pytest.raises(EvalError, match=r"can't write .*; choose another place with XDG_CACHE_HOME"):
        features_of(network, [Image.new("RGB", (8, 8))], features.user_cache() / "features")
    with pytest.raises(EvalError, match="choose another place with --out"):
        features_of(network, [Image.new("RGB", (8, 8))], tmp_path / "file" / "features")


def test_what_is_kept_there_is_read_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network("means", 8, lambda pixels: pixels.mean((2, 3)))
    kept = features_of(network, [Image.new("RGB", (8, 8), "white")], tmp_path)
    monkeypatch.setattr(features, "check_writable", lambda *args: pytest.fail("it is not to be written"))
    assert np.array_equal(features_of(network, [Image.new("RGB", (8, 8), "white")], tmp_path), kept)


@pytest.mark.parametrize("count", [1, 2])
def test_two_real_images_have_no_error_of_a_kid(count: int, tmp_path: Path) -> None:
    for number in range(count):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{number}.png")
    with pytest.raises(EvalError, match=rf"holds {count} images .*; a distance needs 3 or more"):
        image_files(tmp_path)
    for words in (["fid", tmp_path, tmp_path], ["table", "--reference", tmp_path, "--out", tmp_path / "run"]):
        result = CliRunner().invoke(main, [*map(str, words), "--features", "efficientnet-lite0"])
        assert result.exit_code == 2, result.output
        assert "a distance needs 3 or more" in result.output


LONG = "x" * 5000
WORDS = " ".join(["word"] * 1000)


@pytest.mark.parametrize("value", [LONG, WORDS, "/" + "/".join(["folder"] * 700)])
@pytest.mark.parametrize(
    "words",
    [
        ["table", "--model"], ["table", "--methods"], ["table", "--device"], ["table", "--scheduler"],
        ["table", "--prompts"], ["table", "--reference"], ["table", "--steps"], ["table", "--samplers"],
        ["table", "--config"], ["compare", "--ratio"], ["latency", "--arch"], ["check", "--calibrated"],
        ["fid"], ["report"], ["calibrate", "--speedup"], [], ["table"],
    ],
)  # fmt: skip
def test_no_error_repeats_a_long_value(words: list[str], value: str) -> None:
    """Whether it is an option's, a command's, or one too many."""
    result = CliRunner().invoke(main, [*words, value])
    assert result.exit_code == 2
    assert len(result.output) < 1500, result.output[:300]
    longest = max(len(run) for run in re.findall(r"(?:word ?)+|x+|(?:/folder)+", result.output + "x"))
    assert longest < 620


@pytest.mark.parametrize(
    ("message", "short"),
    [
        (f"can't read {'a' * 400}b", f"can't read {'a' * 60}...{'a' * 59}b"),
        (f"mode='{'a b' * 200}': choose", f"mode='{('a b' * 200)[:59]}...{('a b' * 200)[-59:]}': choose"),
        ("it isn't there, " + "and " * 90 + "that's all", None),
        ("/tmp/" + "b" * 200, None),
    ],
)
def test_values_are_shortened_and_prose_is_not(message: str, short: str | None) -> None:
    assert shortened(message) == (message if short is None else short)
    assert len(shortened("[1, 2], " * 1000)) < 2100


def test_memory_is_measured_of_the_unet_that_was_timed(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was compiled; and what the first call of a size compiles is no image's."""
    ran: list[bool] = []
    measuring, sizes = False, []

    def compiled(self: Any) -> None:
        self._compiled_call_impl = lambda *args, **more: (
            ran.append(measuring) or self._call_impl(*args, **more)
        )

    def measured(call: Any, batch: int, device: Any, warm: bool = False) -> float:
        nonlocal measuring
        measuring = True
        call(batch + 1)
        sizes.append((batch, warm))
        measuring = False
        return 1.5

    monkeypatch.setattr(torch.nn.Module, "compile", compiled)
    monkeypatch.setattr(latency, "memory_per_image", measured)
    settings = LatencySettings(
        compile=True, scopes=("forward",), methods=("agentsd",), repeats=2, batches=(3,)
    )
    methods = latency.methods_of(settings.model_copy(update={"fewer_steps": ()}))
    rows = list(latency.measure(pipe, latency.cases_of(settings, pipe), methods, settings, lambda: None))
    assert [row["memory_per_image"] for row in rows] == [1.5] * 4
    assert sum(ran) == len(rows)
    assert sizes == [(3, True)] * 4


def test_what_compiles_at_first_is_called_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = sys.modules[memory_per_image.__module__]
    peak, known = 0.0, {2}  # the size that was timed is compiled

    def call(batch: int) -> None:
        nonlocal peak
        peak = max(peak, 0.5 * batch + 100 * (batch not in known))
        known.add(batch)

    def reset(device: Any) -> None:
        nonlocal peak
        peak = 0.0

    monkeypatch.setattr(memory, "_reset", reset)
    monkeypatch.setattr(memory, "_peak", lambda device: peak)
    assert memory_per_image(call, 2, torch.device("cuda"), warm=True) == 0.5


@pytest.mark.parametrize("clock", ["CPU", "wall"])
def test_a_table_names_the_clock_that_it_went_by(clock: str) -> None:
    """On devices without memory figures, too: MPS, XPU."""
    row = {"method": "fast", "ratio": None, "label": "fast", "speedup": 1.5, "memory_per_image": None}
    tables = quality_table.tables_of([row], {"features": None, "model": "x/y"}, clock)
    assert [c.title for c in tables["cost"] if c.title.startswith("speed-up")] == [f"speed-up ({clock} time)"]


def test_too_few_images_are_said_before_the_first(
    model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(*args: Any) -> None:
        raise EvalError("the first image")

    monkeypatch.setattr(table, "generate", made)
    (tmp_path / "few.txt").write_text("\n".join(f"p{i}" for i in range(29)))
    for words, told in (
        (["--images", "8"], "note: 8 images a row, of 8 prompts, are too few"),
        (
            ["--images", "64", "--prompts", str(tmp_path / "few.txt")],
            "note: 64 images a row, of 29 prompts, are",
        ),
        (["--images", "30"], None),
    ):
        out = ["--out", str(tmp_path / words[1]), "--steps", "2", "--methods", "none"]
        result = CliRunner().invoke(main, ["check", "--model", model_folder, *words, *out])
        printed = " ".join(result.output.split())
        assert "the first image" in printed
        assert (told in printed) if told else ("too few" not in printed)
    assert check.FORMAT == 2


# the mutants that nothing killed


@pytest.mark.parametrize(("guidance", "rows"), [(0.0, 2), (1.0, 2), (1.01, 4), (7.5, 4)])
def test_guidance_of_one_is_none(pipe: Any, guidance: float, rows: int) -> None:
    """As in the pipelines, which ask for a second row of each image above 1 alone."""
    seen: list[int] = []
    pipe.unet.register_forward_pre_hook(lambda unet, given: seen.append(len(given[0])))
    with torch.no_grad():
        latency.forward_call(pipe, latency.Case("forward early", 32, 2), guidance)()
        pipe(["a", "b"], num_inference_steps=1, guidance_scale=guidance, height=32, width=32)
    assert seen[0] == seen[1] == rows


def test_one_plain_row_has_no_gain_and_gives_none() -> None:
    singles = [
        {"method": name, "prompt": str(i), "reference_distance": 0.1 + i / 100}
        for name in ("baseline", "fast")
        for i in range(40)
    ]
    rows: list[Any] = [
        {"method": name, "key": name, "macs": 10, "speedup": 1.0} for name in ("baseline", "fast")
    ]
    table.add_gain(rows, singles)
    assert not any(key.startswith("gain") for row in rows for key in row)


def test_a_forecast_counts_steps_and_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pipe: Any
) -> None:
    """By hand: at 0.1 s a step 25 steps are 2.5 s and 100 steps 10 s, which 1,800 images of each make 6.25 h.
    Of the 3 and 3 images of the trial 2 are there, which leaves 32.5 s."""
    (tmp_path / "classes.txt").write_text("\n".join(map(str, range(900))))
    given = {"classes": tmp_path / "classes.txt", "limit": 3, "steps": 25, "out": tmp_path / "run"}
    settings = RunSettings.model_validate(given)
    store, baseline = Store(settings.out), parse_method("baseline", None, settings)
    store.path(baseline, 0).parent.mkdir(parents=True)
    for index in (0, 2):
        store.path(baseline, index).touch()
    taken = iter([99.0, 0.4])  # the first is to warm up, and the other four steps
    monkeypatch.setattr(preflight, "sample", lambda *args: ([], Seconds(next(taken), 0.0)))
    methods = [baseline, replace(baseline, steps=100)]
    told = preflight.forecast(pipe, store, methods, specs_of(settings), settings)
    assert told.startswith("4 images, about 1 min at most, on ")
    assert told.endswith("Without --limit: 3,600 images, about 6.2 h")


@pytest.mark.parametrize(("images", "batches"), [(4, [2, 2]), (24, [8, 8, 8]), (32, [8, 8, 8, 8])])
def test_methods_take_turns_where_one_batch_would_do(
    images: int, batches: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow moment is then not one method's alone."""
    order: list[tuple[str, int]] = []

    def noted(pipe: Any, method: Any, batch: Any, settings: Any) -> Any:
        order.append((method.name, len(batch)))
        return [Image.new("RGB", (8, 8))] * len(batch), Seconds(1.0, 1.0)

    for name in ("sample", "warm_up"):
        monkeypatch.setattr(
            f"agentsd_eval.images.generate.{name}", noted if name == "sample" else MagicMock()
        )
    settings = RunSettings(batch_size=8)
    methods = [parse_method(name, None, settings) for name in ("baseline", "fast")]
    specs = [ImageSpec(index, "a cat", index) for index in range(images)]
    generate(None, Store(tmp_path), methods, specs, settings, Share(), lambda count: None)
    assert order == [(name, size) for size in batches for name in ("baseline", "fast")]


def test_without_a_terminal_progress_is_a_line_a_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now, out = 0.0, io.StringIO()
    monkeypatch.setattr("agentsd_eval.pages.rows.time.monotonic", lambda: now)
    for disable in (False, True):
        with progress(Console(file=out), disable) as bars:
            task = bars.add_task("images", total=8)
            for now in (0.0, 30.0, 59.0, 61.0, 90.0, 122.5):  # noqa: B007
                bars.advance(task)
    told = capsys.readouterr()
    assert [line.partition(",")[0] for line in told.err.splitlines()] == [
        f"images: {done} of 8" for done in (1, 4, 6)
    ]
    assert out.getvalue() == told.out == ""


@pytest.mark.parametrize("name", ["baseline", "baseline@4", "baseline@4/plms", "baseline/unipckarras"])
def test_macs_of_a_plain_row_are_those_of_its_calls(pipe: Any, name: str) -> None:
    """As counted in the run itself; PLMS calls the U-Net once more than it has steps."""
    settings = RunSettings(model="x/y", steps=6, height=32, width=32)
    specs, method = [ImageSpec(0, "a cat", 0)], parse_method(name, None, settings)
    counted = macs(lambda: sample(pipe, method, specs, settings))
    assert table.plain_macs(pipe, specs, settings)(method) == counted


def test_a_pipeline_whose_weights_are_elsewhere_makes_the_same_images(make_pipeline: Any) -> None:
    settings = RunSettings(model="x/y", steps=2, height=32, width=32)
    specs, method = [ImageSpec(0, "a cat", 0)], parse_method("fast", None, settings)
    whole, offloaded = make_pipeline(), make_pipeline()
    cpu_offload(offloaded.unet)
    assert offloaded.unet.device.type == "meta"
    [[one], [other]] = (sample(pipe, method, specs, settings)[0] for pipe in (whole, offloaded))
    assert one == other


def test_offloading_is_that_of_diffusers(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        ((*PARTS, "cond_stage_model.a"), "StableDiffusionPipeline"),
        ((*PARTS, "conditioner.embedders.0.a"), "StableDiffusionXLPipeline"),
        ((PARTS[0], "cond_stage_model.a"), None),
        (PARTS, None),
        ((), None),
    ],
)
def test_a_model_may_be_one_file(
    names: tuple[str, ...], kind: str | None, pipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, loaded = tmp_path / "model.safetensors", []
    if names:
        save_file({name: torch.zeros(1) for name in names}, path)
    else:
        path.write_bytes(b"no weights")
    for one in ("StableDiffusionPipeline", "StableDiffusionXLPipeline"):
        load = lambda path, torch_dtype, one=one: loaded.append((one, path, torch_dtype)) or pipe  # noqa: E731
        monkeypatch.setattr(f"diffusers.{one}.from_single_file", load)
    settings = RunSettings(model=str(path), device="cpu")
    if kind is None:
        with pytest.raises(EvalError, match=r"can't load the model .*; give 'demo', "):
            models.load_pipeline(settings)
    else:
        assert models.load_pipeline(settings) is pipe
    assert loaded == ([(kind, str(path), torch.float32)] if kind else [])


def test_of_equally_cheap_rows_the_nearer_counts() -> None:
    """By hand: on the line from (.8, 1) to (.2, 4), half of the way is 2; (.4, 4) is no part of it."""
    for order in (1, -1):
        costs, distances = np.array([1.0, 4.0, 4.0])[::order], np.array([0.8, 0.4, 0.2])[::order]
        assert cost_at(0.4, costs, distances) == pytest.approx(2.0)
        assert cost_at(0.2, costs, distances) == pytest.approx(4.0)
