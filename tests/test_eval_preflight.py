"""What would end a run after hours is said before its first image; memory is looked at first."""

from __future__ import annotations

import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from agentsd_eval.cost import memory
from agentsd_eval.cost.memory import PipelineMemory, growth, pipeline_memory
from agentsd_eval.errors import EvalError
from agentsd_eval.images.methods import Method
from agentsd_eval.images.prompts import from_prompts, specs_of
from agentsd_eval.images.store import Store
from agentsd_eval.settings import RunSettings
from agentsd_eval.studies import preflight, table
from rich.console import Console

BASELINE = Method(())
IMAGES = from_prompts(["a cat"], 4, 0)
CLASSES = "tench\ngoldfish\nshark\n"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    (tmp_path / "prompts.txt").write_text("a cat\n")
    return tmp_path / "prompts.txt"


@pytest.fixture
def classes(tmp_path: Path) -> Path:
    (tmp_path / "classes.txt").write_text(CLASSES)
    return tmp_path / "classes.txt"


def test_inception_without_real_images_is_refused_before_the_model_is_loaded(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "load_pipeline", lambda settings: pytest.fail("loaded"))
    settings = RunSettings(model="some/model", prompts=prompts, features="inception", out=tmp_path / "run")
    with pytest.raises(EvalError, match=r"no FID; give --reference FOLDER_OF_REAL_IMAGES"):
        table.run(settings, [BASELINE], "table", Console(quiet=True))
    assert not (tmp_path / "run").exists()


def test_a_trial_takes_the_first_images_and_a_folder_of_its_own(classes: Path, tmp_path: Path) -> None:
    whole = RunSettings(classes=classes, out=tmp_path / "run")
    trial = RunSettings.model_validate({"classes": classes, "out": tmp_path / "run", "limit": 3})
    assert [p.prompt for p in specs_of(trial)] == [p.prompt for p in specs_of(whole)[:3]]
    assert trial.out == tmp_path / "run-limit-3"
    assert RunSettings.model_validate(trial.model_dump()).out == trial.out
    assert RunSettings.model_validate({"limit": 4}).out == Path("agentsd-results/table-limit-4")
    assert len(specs_of(RunSettings.model_validate({"images": 9, "limit": 5}))) == 5


def test_images_that_classes_decide_are_refused(classes: Path) -> None:
    with pytest.raises(EvalError, match=r"images = 16: the classes ask for 6, .* try fewer with --limit 16"):
        specs_of(RunSettings(classes=classes, images=16))


def test_a_disk_without_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 0, 10**9))
    store = Store(tmp_path)
    preflight.check_disk(store, [BASELINE], 2000, 512, 512)
    with pytest.raises(
        EvalError, match=r"28,000 images of 512x512 need about 13\.2 GB, and 1\.0 GB are free"
    ):
        preflight.check_disk(store, [BASELINE] * 14, 2000, 512, 512)
    done = store.path(BASELINE, 0)
    done.parent.mkdir(parents=True)
    for number in range(3):
        done.with_name(f"{number:05d}.png").touch()
    with pytest.raises(EvalError, match="3,997 images of"):  # what is there takes no more room
        preflight.check_disk(store, [BASELINE], 4000, 512, 512)


def test_too_little_memory_to_measure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    available = SimpleNamespace(available=6e9)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: available)
    preflight.check_memory(2000, 3)
    with pytest.raises(EvalError, match=r"20,000 images a row needs about \d+\.\d GB of memory, and 6\.0 GB"):
        preflight.check_memory(20_000, 3)


class Gpu:
    """A GPU that holds what a run allocates; `pipe` denoises, then decodes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, total: float = 24.0) -> None:
        self.peak = self.now = 0.0
        monkeypatch.setattr(memory, "_reset", lambda device: setattr(self, "peak", self.now))
        monkeypatch.setattr(memory, "_peak", lambda device: self.peak)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        properties = SimpleNamespace(total_memory=total * 1e9)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        self.pipe = SimpleNamespace(
            _execution_device=torch.device("cuda"), vae=SimpleNamespace(decode=self.decode)
        )
        self.weights, self.denoising, self.decoding = 2.0, 0.3, 0.5

    def hold(self, gigabytes: float) -> None:
        self.now = self.weights + gigabytes
        self.peak = max(self.peak, self.now)
        self.now = self.weights

    def decode(self, count: int) -> None:
        self.hold(self.decoding * count)

    def call(self, count: int) -> None:
        self.hold(1 + self.denoising * count)
        self.pipe.vae.decode(count)


def test_denoising_and_decoding_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    decode = gpu.pipe.vae.decode
    found = pipeline_memory(gpu.pipe, gpu.call)
    assert found is not None
    assert growth(found.denoising) == pytest.approx(0.3)
    assert growth(found.decoding) == pytest.approx(0.5)
    assert growth(found.total) == pytest.approx(0.3)  # of two, denoising still takes most
    assert found.needed(8) == pytest.approx(2 + 8 * 0.5)  # of eight, decoding does
    assert gpu.pipe.vae.decode == decode


def test_memory_per_image_is_what_one_more_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    for batch in (1, 6):
        found = memory.memory_per_image(gpu.call, batch, torch.device("cuda"))
        assert found == pytest.approx(0.3 if batch == 1 else 0.5)  # of more, decoding takes most
    assert memory.memory_per_image(gpu.call, 1, torch.device("cpu")) is None


def sampled(monkeypatch: pytest.MonkeyPatch, call: Callable[[int], Any]) -> None:
    monkeypatch.setattr(preflight, "sample", lambda pipe, method, wanted, settings: call(len(wanted)))


def test_a_batch_that_does_not_fit_is_refused_with_one_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch, total=4.0)
    sampled(monkeypatch, gpu.call)
    with pytest.raises(
        EvalError, match=r"batches of 8 need about 6\.0 GB, and this GPU has 4\.0 GB; take --b"
    ):
        preflight.measure_memory(gpu.pipe, BASELINE, IMAGES, RunSettings(batch_size=8))
    found = preflight.measure_memory(gpu.pipe, BASELINE, IMAGES, RunSettings(batch_size=3))
    assert isinstance(found, PipelineMemory)


def test_where_two_images_do_not_fit_one_still_makes_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)

    def full(count: int) -> None:
        if count > 1:
            raise torch.OutOfMemoryError("too much")
        gpu.call(count)

    sampled(monkeypatch, full)
    assert preflight.measure_memory(gpu.pipe, BASELINE, IMAGES, RunSettings(batch_size=1)) is None
    with pytest.raises(EvalError, match=r"baseline: this GPU's memory doesn't do for 2 .*--batch-size 1"):
        preflight.measure_memory(gpu.pipe, BASELINE, IMAGES, RunSettings(batch_size=2))


def test_memory_comes_before_images_and_its_lack_costs_none(
    model_folder: str, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    generate = table.generate

    def measured(*args: Any) -> None:
        order.append("memory")

    def made(*args: Any) -> None:
        order.append("images")
        generate(*args)

    monkeypatch.setattr(table, "measure_memory", measured)
    monkeypatch.setattr(table, "generate", made)
    settings = RunSettings(
        model=model_folder,
        prompts=prompts,
        images=2,
        steps=2,
        fewer_steps=(),
        reference_steps=None,
        out=tmp_path / "run",
    )
    rows = table.run(settings, [BASELINE], "table", Console(quiet=True))
    assert order[:2] == ["memory", "images"]
    assert rows[0]["memory_per_image"] is None
    assert "| baseline | - | - |" in (tmp_path / "run" / "table.md").read_text()
