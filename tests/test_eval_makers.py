"""Each figure has its maker: seconds of one machine and batch size, costs of the machine that is named."""

import json

import pytest
import torch
from agentsd_eval import run_file
from agentsd_eval.environment import describe_run, device_name
from agentsd_eval.errors import EvalError
from agentsd_eval.images.generate import fingerprint
from agentsd_eval.images.methods import Method
from agentsd_eval.images.prompts import ImageSpec, from_prompts, prompts_of
from agentsd_eval.images.sampling import Seconds
from agentsd_eval.images.store import Entry, Store, times_of
from agentsd_eval.research import gpu
from agentsd_eval.research.settings import GpuSettings
from agentsd_eval.settings import RunSettings
from agentsd_eval.studies import table
from commands import invoke
from PIL import Image
from rich.console import Console

CPU = torch.device("cpu")
A = {"commit": "a" * 40, "clean": True, "device": "machine A", "threads": 1, "versions": {"torch": "2"}}
B = A | {"device": "machine B", "threads": 4}
SETTINGS = RunSettings(steps=2, scheduler="model", fewer_steps=(), samplers=())


def entry(seconds, images, maker="1"):
    taken = {"seconds": seconds, "cpu_seconds": 2 * seconds}
    told = {"index": 0, "seed": 0, "prompt": "", "sha256": "", "batch": 0, "session": "a"}
    return Entry(batch_images=images, maker=maker, timed_by=maker, **taken, **told)


def test_seconds_are_an_images_and_speed_ups_of_one_session():
    """By hand: three batches of 4 in 4, 8 and 6 s are 1, 2 and 1.5 s an image."""
    ours = {(0, "a"): entry(4, 4), (1, "a"): entry(8, 4), (2, "b"): entry(6, 4), (3, "b"): entry(90, 1)}
    baseline = {(0, "a"): entry(8, 4), (1, "a"): entry(24, 4), (2, "c"): entry(300, 4)}
    for device, clock in (("cpu", 2), ("cuda", 1), ("mps", 1), ("xpu", 1)):
        _, found = times_of([baseline, ours], torch.device(device))
        assert (found["seconds"], found["cpu_seconds"]) == (1.5, 3.0)
        assert (found["speedup"], found["speedup_batches"]) == (2.5, 2)
        assert (found["timed_by"], found["timed_batch"]) == ("1", 4)
        assert Seconds(1.5, 3.0).charged(torch.device(device)) == 1.5 * clock


def batches(*kinds, session="a"):
    """So many batches of a maker and a size, which take so many seconds an image."""
    every = [entry(each * size, size, maker) for maker, size, count, each in kinds for _ in range(count)]
    return {(number, session): one for number, one in enumerate(every)}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        # another batch size after a stop: of the size of most images, whichever has more batches
        ([[("1", 8, 3, 1.0), ("1", 2, 8, 5.0)]] * 2, [("1", 8, 1.0)] * 2),
        # another machine after a stop
        ([[("1", 8, 3, 1.0), ("2", 8, 4, 5.0)]] * 2, [("2", 8, 5.0)] * 2),
        ([[("1", 8, 4, 1.0), ("2", 8, 3, 5.0)]] * 2, [("1", 8, 1.0)] * 2),
        # as many of both: of one, and not between them
        ([[("1", 8, 4, 1.0), ("2", 8, 4, 5.0)]] * 2, [("2", 8, 5.0)] * 2),
        # most of the first row's are of a machine that has none of the second's
        ([[("1", 8, 9, 1.0), ("2", 8, 1, 5.0)], [("2", 8, 9, 7.0)]], [("2", 8, 5.0), ("2", 8, 7.0)]),
        # nothing that both have: each by itself, and told apart
        ([[("1", 8, 9, 1.0)], [("2", 4, 9, 7.0)]], [("1", 8, 1.0), ("2", 4, 7.0)]),
    ],
)
def test_seconds_are_of_one_maker_and_size(rows, expected):
    found = times_of([batches(*row) for row in rows], CPU)
    assert [(row["timed_by"], row["timed_batch"], row["seconds"]) for row in found] == expected


def test_a_time_is_of_the_machine_that_took_it(tmp_path):
    """The second machine times the baseline of the first again, beside a row that only the second makes."""
    specs, picture = from_prompts(["a"], 1, 0), [Image.new("RGB", (8, 8))]
    baseline, late = Method(()), Method(("todo",))
    first = Store(tmp_path)
    first.claim({}, A)
    first.save(baseline, 0, specs, picture, Seconds(1, 1), "a")
    second = Store(tmp_path)
    second.claim({}, B)
    second.save_time(baseline, 0, list(second.intact(baseline).values()), Seconds(9, 9), "b")
    assert [row["seconds"] for row in times_of([second.timings(baseline)], CPU)] == [9]
    second.save(late, 0, specs, picture, Seconds(3, 3), "b")
    found = times_of([second.timings(baseline), second.timings(late)], CPU)
    assert [(row["seconds"], row["speedup"], row["timed_by"]) for row in found] == [(9, 1, "2"), (3, 3, "2")]
    assert [second.makers(method)["makers"] for method in (baseline, late)] == ["1", "2"]


def test_a_speed_up_is_of_that_machine_alone():
    """Twice as fast on the one, eight times on the other."""
    baseline = batches(("1", 8, 4, 4.0), ("2", 8, 9, 8.0))
    ours = batches(("1", 8, 4, 2.0), ("2", 8, 9, 1.0))
    _, found = times_of([baseline, ours], CPU)
    assert (found["timed_by"], found["speedup"], found["speedup_batches"]) == ("2", 8.0, 9)


def test_environments_that_differ_are_all_told():
    found = describe_run(SETTINGS, A, B)
    assert (found["device"], found["threads"]) == ("machine A and machine B", "1 and 4")
    assert (found["commit"], found["versions"]) == ("a" * 40, {"torch": "2"})
    assert describe_run(SETTINGS, A, A | {"versions": {"torch": "3"}})["versions"] == {"torch": "2 and 3"}
    assert describe_run(SETTINGS, B)["device"] == "machine B"


def test_a_device_goes_by_its_own_name(monkeypatch):
    class Module:
        get_device_name = staticmethod(lambda device: f"card {device.index}")

    modules = {"xpu": Module, "mps": object()}
    monkeypatch.setattr(torch, "get_device_module", lambda device: modules[device.type])
    assert device_name(torch.device("xpu:1")) == "card 1"
    assert device_name(torch.device("mps")) == f"mps of {device_name(CPU)}"


@pytest.fixture
def on(monkeypatch, model_folder, tmp_path):
    """Runs `check` on a machine, into one folder; returns what was printed and what would be sent in."""
    words = ["check", "--model", model_folder, "--methods", "agentsd", "--steps", 2, "--samplers", "none"]
    words += ["--reference-steps", "none", "--out", tmp_path / "run"]

    def run(machine, *more):
        told = {"cpu": "x", "cores": 1, "clock": "CPU", "processes": 1, "python": "3"}
        monkeypatch.setattr(table, "describe_environment", lambda device: told | machine)
        monkeypatch.setattr(table, "macs", lambda call: 1000 * machine["threads"])
        return invoke(*words, *more), json.loads((tmp_path / "run" / "check.json").read_text())

    return run


def test_what_is_sent_in_names_the_machine_of_each_figure(on, tmp_path):
    _, first = on(A, "--images", 2)
    assert first["environment"]["device"] == "machine A"
    assert "environments" not in first["environment"]
    made = "makers", "timed_by", "costed_by", "macs"
    assert {tuple(row[key] for key in made) for row in first["rows"]} == {("1", "1", "1", 1000)}
    printed, second = on(B, "--images", 2)  # the images are there, and memory and MACs would be the other's
    assert {tuple(row[key] for key in made) for row in second["rows"]} == {("1", "1", "2", 4000)}
    assert [row["seconds"] for row in second["rows"]] == [row["seconds"] for row in first["rows"]]
    assert second["environment"]["device"] == "machine A and machine B"
    devices = {n: one["device"] for n, one in second["environment"]["environments"].items()}
    assert devices == {"1": "machine A", "2": "machine B"}
    said = "not all of one program and machine (1: machine A, commit aaaaaaaaaaaa, 1 threads; 2: machine B,"
    assert said in printed
    assert said in " ".join((tmp_path / "run" / "check.md").read_text().split())
    assert "machine A and machine B, 1 and 4 threads" in (tmp_path / "run" / "report.html").read_text()
    _, third = on(A, "--images", 2)  # back again: what it measured itself stands
    assert third["environment"]["device"] == "machine A"
    assert {row["macs"] for row in third["rows"]} == {1000}


def test_a_run_goes_on_with_more_images_and_another_batch(on, tmp_path):
    on(A, "--images", 6, "--batch-size", 2)
    before = {path: path.read_bytes() for path in (tmp_path / "run" / "images").rglob("*.png")}
    printed, more = on(A, "--images", 15, "--batch-size", 3)
    assert all(row["images"] == 15 for row in more["rows"])
    assert {row["timed_batch"] for row in more["rows"]} == {3}
    assert "batches of" not in printed
    assert all(path.read_bytes() == content for path, content in before.items())
    _, fewer = on(A, "--images", 4, "--batch-size", 3)
    assert all(row["images"] == 4 for row in fewer["rows"])
    assert len(list((tmp_path / "run" / "images" / "baseline-sdpa").glob("*.png"))) == 15


@pytest.fixture
def claim(pipe, tmp_path):
    """Begins a run of these images in one folder, or goes on with it; returns its maker."""
    store = Store(tmp_path)

    def claim(specs, machine=A):
        store.claim(fingerprint(pipe, specs, SETTINGS), machine)
        return store.maker

    return claim


def test_other_images_of_another_number_are_refused(claim):
    """More of the same go on: the toy model's captions, too, are the first of any more."""
    claim(prompts_of("demo", 8, 0))
    with pytest.raises(EvalError, match="seeds: 'of 8 images' there, 'of 16, not the same ones' now"):
        claim(prompts_of("demo", 16, 1))
    with pytest.raises(EvalError, match="prompts_and_seeds"):
        claim(prompts_of("demo", 8, 1))
    assert claim(prompts_of("demo", 16, 0), B) == "2"


def test_how_many_were_asked_for_at_most_is_remembered(claim, tmp_path):
    every = from_prompts(["a", "b", "c"], 9, 0)
    for count in (3, 9, 2, 5):
        claim(every[:count])
    with pytest.raises(EvalError, match="of 9, not"):
        claim([*every[:8], ImageSpec(8, "d", 8)])
    assert len(run_file.read(tmp_path)["images"]["prompts_and_seeds"]) == 4 * 9


def test_a_gpus_rows_are_not_continued_on_another(tmp_path):
    (tmp_path / "gpu.jsonl").write_text('{"stage": "environment", "device": "H200"}\n')
    settings = GpuSettings(device="cpu", tiny=True, out=tmp_path)
    with pytest.raises(EvalError, match=r"gpu.jsonl: its rows are of H200, this is .*; choose another --out"):
        gpu.command(settings, Console(quiet=True))
