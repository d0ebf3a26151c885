"""What would end a run after hours is said before its first image; memory is looked at first."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from agentsd_eval.cost import memory
from agentsd_eval.cost.memory import PipelineMemory, growth, pipeline_memory
from agentsd_eval.errors import EvalError
from agentsd_eval.images.methods import Method
from agentsd_eval.images.prompts import from_prompts, specs_of
from agentsd_eval.images.sampling import Seconds
from agentsd_eval.images.store import Store
from agentsd_eval.settings import RunSettings
from agentsd_eval.studies import preflight, table
from commands import invoke
from rich.console import Console

BASELINE = Method(())
IMAGES = from_prompts(["a cat"], 4, 0)


@pytest.fixture
def classes(tmp_path):
    (tmp_path / "classes.txt").write_text("tench\ngoldfish\nshark\n")
    return tmp_path / "classes.txt"


def test_inception_without_real_images_is_refused_before_the_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "load_pipeline", lambda settings: pytest.fail("loaded"))
    settings = RunSettings(model="some/model", features="inception", out=tmp_path / "run")
    with pytest.raises(EvalError, match=r"no FID; give --reference FOLDER_OF_REAL_IMAGES"):
        table.run(settings, [BASELINE], "table", Console(quiet=True))
    assert not (tmp_path / "run").exists()


def test_a_trial_takes_the_first_images_and_a_folder_of_its_own(classes, tmp_path):
    whole = RunSettings(classes=classes, out=tmp_path / "run")
    trial = RunSettings(classes=classes, out=tmp_path / "run", limit=3)
    assert [p.prompt for p in specs_of(trial)] == [p.prompt for p in specs_of(whole)[:3]]
    assert trial.out == tmp_path / "run-limit-3"
    assert RunSettings.model_validate(trial.model_dump()).out == trial.out
    assert RunSettings(limit=4).out == Path("agentsd-results/table-limit-4")
    assert len(specs_of(RunSettings(images=9, limit=5))) == 5


def test_images_that_classes_decide_are_refused(classes):
    with pytest.raises(EvalError, match=r"images = 16: the classes ask for 6, .* try fewer with --limit 16"):
        specs_of(RunSettings(classes=classes, images=16))


def make_empty(store, method, indices):
    """Put files where a method's images are looked for."""
    for index in indices:
        path = store.path(method, index)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_a_forecast_counts_steps_and_images(tmp_path, monkeypatch, pipe):
    """By hand: at 0.1 s a step 25 steps are 2.5 s and 100 steps 10 s, which 1,800 images of each make 6.25 h.
    Of the 3 and 3 images of the trial 2 are there, which leaves 32.5 s."""
    (tmp_path / "classes.txt").write_text("\n".join(map(str, range(900))))
    settings = RunSettings(classes=tmp_path / "classes.txt", limit=3, steps=25, out=tmp_path / "run")
    store = Store(settings.out)
    make_empty(store, BASELINE, (0, 2))
    taken = iter([99.0, 0.4])  # the first is to warm up, and the other four steps
    monkeypatch.setattr(preflight, "sample", lambda *args: ([], Seconds(next(taken), 0.0)))
    methods = [BASELINE, Method((), steps=100)]
    told = preflight.forecast(pipe, store, methods, specs_of(settings), settings)
    assert told.startswith("4 images, about 1 min at most, on ")
    assert told.endswith("Without --limit: 3,600 images, about 6.2 h")


@pytest.mark.parametrize(
    ("images", "prompts", "told"),
    [
        (8, 29, "note: 8 images a row, of 8 prompts, are too few"),
        (64, 29, "note: 64 images a row, of 29 prompts, are too few"),
        (30, 30, ""),
    ],
)
def test_too_few_images_are_said_before_the_first(images, prompts, told, model_folder, tmp_path, monkeypatch):
    def made(*args):
        raise EvalError("the first image")

    monkeypatch.setattr(table, "generate", made)
    (tmp_path / "prompts.txt").write_text("\n".join(f"p{i}" for i in range(prompts)))
    words = ("--prompts", tmp_path / "prompts.txt", "--images", images, "--steps", 2, "--methods", "fast")
    printed = invoke("check", "--model", model_folder, *words, "--out", tmp_path / "run", code=2)
    assert "the first image" in printed
    assert told in printed
    assert ("too few" in printed) == bool(told)


def test_a_disk_without_room_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**9))
    store = Store(tmp_path)
    preflight.check_disk(store, [BASELINE], 2000, 512, 512)
    told = r"28,000 images of 512x512 need about 13\.2 GB, and 1\.0 GB are free"
    with pytest.raises(EvalError, match=told):
        preflight.check_disk(store, [BASELINE] * 14, 2000, 512, 512)
    make_empty(store, BASELINE, range(3))
    with pytest.raises(EvalError, match="3,997 images of"):  # what is there takes no more room
        preflight.check_disk(store, [BASELINE], 4000, 512, 512)


def test_too_little_memory_to_measure_is_named(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=6e9))
    preflight.check_memory(2000, 3)
    with pytest.raises(EvalError, match=r"20,000 images a row needs about \d+\.\d GB of memory, and 6\.0 GB"):
        preflight.check_memory(20_000, 3)


WEIGHTS = 2.0  # GB


class Gpu:
    """A GPU that holds what a run allocates; `pipe` denoises, then decodes."""

    def __init__(self, monkeypatch, total=24.0):
        self.peak = WEIGHTS
        monkeypatch.setattr(memory, "_reset", lambda device: setattr(self, "peak", WEIGHTS))
        monkeypatch.setattr(memory, "_peak", lambda device: self.peak)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        properties = SimpleNamespace(total_memory=total * 1e9)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        vae = SimpleNamespace(decode=lambda count: self.hold(0.5 * count))
        self.pipe = SimpleNamespace(_execution_device=torch.device("cuda"), vae=vae)

    def hold(self, gigabytes):
        """So many beside the weights, for a moment."""
        self.peak = max(self.peak, WEIGHTS + gigabytes)

    def call(self, count):
        self.hold(1 + 0.3 * count)
        self.pipe.vae.decode(count)


def test_denoising_and_decoding_are_apart(monkeypatch):
    gpu = Gpu(monkeypatch)
    decode = gpu.pipe.vae.decode
    found = pipeline_memory(gpu.pipe, gpu.call)
    assert growth(found.denoising) == pytest.approx(0.3)
    assert growth(found.decoding) == pytest.approx(0.5)
    assert growth(found.total) == pytest.approx(0.3)  # of two, denoising still takes most
    assert found.needed(8) == pytest.approx(2 + 8 * 0.5)  # of eight, decoding does
    assert gpu.pipe.vae.decode == decode


def test_memory_per_image_is_what_one_more_takes(monkeypatch):
    gpu = Gpu(monkeypatch)
    for batch, expected in ((1, 0.3), (6, 0.5)):  # of more, decoding takes most
        found = memory.memory_per_image(gpu.call, batch, torch.device("cuda"))
        assert found == pytest.approx(expected)
    assert memory.memory_per_image(gpu.call, 1, torch.device("cpu")) is None


def test_what_the_first_call_of_a_size_compiles_is_no_images_memory(monkeypatch):
    gpu, known = Gpu(monkeypatch), {2}  # the size that was timed is compiled

    def call(count):
        gpu.hold(0.5 * count + 100 * (count not in known))
        known.add(count)

    assert memory.memory_per_image(call, 2, torch.device("cuda"), warm=True) == pytest.approx(0.5)


def measured(gpu, call, batch_size, monkeypatch):
    """A method's memory, before batches of that size."""
    monkeypatch.setattr(preflight, "sample", lambda pipe, method, wanted, settings: call(len(wanted)))
    return preflight.measure_memory(gpu.pipe, BASELINE, IMAGES, RunSettings(batch_size=batch_size))


def test_a_batch_that_does_not_fit_is_refused_with_one_that_does(monkeypatch):
    gpu = Gpu(monkeypatch, total=4.0)
    told = r"batches of 8 need about 6\.0 GB, and this GPU has 4\.0 GB; take --b"
    with pytest.raises(EvalError, match=told):
        measured(gpu, gpu.call, 8, monkeypatch)
    assert isinstance(measured(gpu, gpu.call, 3, monkeypatch), PipelineMemory)


def test_where_two_images_do_not_fit_one_still_makes_a_row(monkeypatch):
    gpu = Gpu(monkeypatch)

    def full(count):
        if count > 1:
            raise torch.OutOfMemoryError("too much")
        gpu.call(count)

    assert measured(gpu, full, 1, monkeypatch) is None
    with pytest.raises(EvalError, match=r"baseline: this GPU's memory doesn't do for 2 .*--batch-size 1"):
        measured(gpu, full, 2, monkeypatch)


def test_memory_comes_before_images_and_its_lack_costs_none(model_folder, tmp_path, monkeypatch):
    order, generate = [], table.generate
    monkeypatch.setattr(table, "measure_memory", lambda *args: order.append("memory"))
    monkeypatch.setattr(table, "generate", lambda *args: order.append("images") or generate(*args))
    few = {"images": 2, "steps": 2, "fewer_steps": (), "reference_steps": None}
    settings = RunSettings(model=model_folder, **few, out=tmp_path)
    [row] = table.run(settings, [BASELINE], "table", Console(quiet=True))
    assert order == ["memory", "images"]
    assert row["memory_per_image"] is None
    assert "| baseline | - | - |" in (tmp_path / "table.md").read_text()
