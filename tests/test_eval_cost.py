"""Time, MACs and memory: of the same weights in the same rounds, of what runs, and for what fits."""

from functools import partialmethod

import pytest
import torch
from agentsd_eval.cost import latency
from agentsd_eval.cost.macs import macs
from agentsd_eval.images import other_packages
from agentsd_eval.images.methods import parse_method
from agentsd_eval.images.prompts import from_prompts
from agentsd_eval.images.sampling import Seconds, sample
from agentsd_eval.settings import LatencySettings, RunSettings
from agentsd_eval.studies import table
from commands import invoke, rows_of
from diffusers import UNet2DConditionModel
from torch._dynamo.testing import CompileCounter


@pytest.fixture
def measured(model_folder, tmp_path):
    """Runs `latency` on a tiny model; returns its rows, and what was printed."""

    def run(*words):
        small = ("--model", model_folder, "--ratio", 0.5, "--steps", 3, "--sizes", 64, "--repeats", 1)
        printed = invoke("latency", *small, *words, "--out", tmp_path)
        return rows_of(tmp_path / "latency.jsonl"), printed

    return run


def test_latency_has_a_row_for_each_method_and_phase(measured):
    words = ("--methods", "agentsd,deepcache", "--fewer-steps", 0.4)
    rows, printed = measured(*words)
    assert "forward early" in printed
    found = {(row["scope"], row["method"]): row for row in rows}
    assert ("forward late", "deepcache") not in found  # it has no cost within one call
    assert len(found) == 2 * 2 + 4  # with baseline@1 in whole runs
    early, late = (found[f"forward {phase}", "agentsd"] for phase in ("early", "late"))
    baseline = found["forward early", "baseline"]
    assert early["macs"] < late["macs"] < baseline["macs"]
    assert baseline["speedup"] == 1.0
    unfused, _ = measured(*words, "--backend", "unfused", "--scopes", "forward")
    assert {row["backend"] for row in unfused} == {"unfused"}
    assert unfused[0]["macs"] == baseline["macs"]  # the count doesn't depend on how attention is computed


def test_a_speed_up_is_of_the_same_rounds():
    """By hand: rounds of 4, 6 and 9 s beside 2, 2 and 6 s are ratios of 2, 3 and 1.5."""
    baseline, ours = (parse_method(name, 0.5, LatencySettings()) for name in ("baseline", "agentsd"))
    rounds = {baseline: (4.0, 6.0, 9.0), ours: (2.0, 2.0, 6.0)}
    seconds = {method: [Seconds(10 * one, one) for one in times] for method, times in rounds.items()}
    found = latency.speedup_of(seconds, ours, torch.device("cpu"))
    assert found == {"speedup": 2.0, "speedup_low": 1.5, "speedup_high": 3.0}


FORWARD = {"methods": ("agentsd",), "fewer_steps": (), "scopes": ("forward",), "sizes": (64,), "repeats": 2}


def test_methods_take_turns_on_the_same_weights(pipe, monkeypatch):
    """Each in its own U-Net, warm-up first, and without a count none is counted."""
    settings, order = LatencySettings(**FORWARD, count=False), []
    weights, forward = {id(weight) for weight in pipe.unet.parameters()}, UNet2DConditionModel.forward

    def noted(self, *args, **kwargs):
        order.append(id(self))
        assert {id(weight) for weight in self.parameters()} == weights
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(UNet2DConditionModel, "forward", noted)
    case, methods = latency.Case("forward early", 64, 1), latency.methods_of(settings)
    rows = list(latency.measure(pipe, [case], methods, settings, lambda: order.append("round")))
    first, second = order[:2]
    assert first != second
    assert order == [first, second, "round"] * 3
    assert [row["macs"] for row in rows] == [None, None]


def test_a_method_that_memory_does_not_do_for_costs_no_others_figures(measured, tmp_path, monkeypatch):
    def too_much(*args, **kwargs):
        raise torch.OutOfMemoryError("unfused attention's score matrix")

    monkeypatch.setattr(other_packages._NoCore, "__call__", too_much)
    monkeypatch.setattr(latency, "memory_per_image", too_much)  # what fits, but not with one image more
    rows, _ = measured("--methods", "agentsd,no-attention", "--scopes", "forward")
    for key in ("seconds", "macs", "speedup"):
        assert [row[key] is None for row in rows] == [False, False, True] * 2
    assert (tmp_path / "latency.md").read_text().count("out of memory") == 2


@pytest.mark.slow
def test_compiled_each_kind_of_call_is_one_graph(measured, monkeypatch):
    """And no graph is made while they are timed. It runs as it was traced."""
    counter = CompileCounter()
    with_counter = partialmethod(torch.nn.Module.compile, backend=counter)
    monkeypatch.setattr(torch.nn.Module, "compile", with_counter)
    rows, printed = measured("--compile", "--methods", "agentsd", "--scopes", "forward", "--repeats", 3)
    assert "3 steps (dpm++karras), compiled" in printed
    assert [row["method"] for row in rows] == ["baseline", "agentsd"] * 2
    assert counter.frame_count == 3  # the baseline's, and two phases of AgentSD


def test_memory_is_that_of_the_compiled_unet_that_was_timed(pipe, monkeypatch):
    ran, found = [], []

    def compiled(self):
        call = self._call_impl
        self._compiled_call_impl = lambda *args, **more: ran.append(1) or call(*args, **more)

    def memory(call, batch, device, warm):
        ran.clear()
        call(batch + 1)
        found.append((len(ran), batch, warm))
        return 1.5

    monkeypatch.setattr(torch.nn.Module, "compile", compiled)
    monkeypatch.setattr(latency, "memory_per_image", memory)
    settings = LatencySettings(**FORWARD, compile=True, batches=(3,))
    cases, methods = latency.cases_of(settings, pipe), latency.methods_of(settings)
    rows = list(latency.measure(pipe, cases, methods, settings, lambda: None))
    assert [row["memory_per_image"] for row in rows] == [1.5] * 4
    assert found == [(1, 3, True)] * 4


@pytest.mark.parametrize(("guidance", "rows"), [(0.0, 2), (1.0, 2), (1.01, 4), (7.5, 4)])
def test_guidance_of_one_is_none(pipe, guidance, rows):
    """As in the pipelines, which ask for a second row of each image above 1 alone."""
    seen = []
    pipe.unet.register_forward_pre_hook(lambda unet, given: seen.append(len(given[0])))
    with torch.no_grad():
        latency.forward_call(pipe, latency.Case("forward early", 32, 2), guidance)()
        pipe(["a", "b"], num_inference_steps=1, guidance_scale=guidance, height=32, width=32)
    assert seen[0] == seen[1] == rows


@pytest.mark.parametrize("name", ["baseline", "baseline@4", "baseline@4/plms", "baseline/unipckarras"])
def test_macs_of_a_plain_row_are_those_of_its_calls(pipe, name):
    """As counted in the run itself; PLMS calls the U-Net once more than it has steps."""
    settings, specs = RunSettings(model="x/y", steps=6, height=32, width=32), from_prompts(["a cat"], 1, 0)
    method = parse_method(name, None, settings)
    counted = macs(lambda: sample(pipe, method, specs, settings))
    assert table.plain_macs(pipe, specs, settings)(method) == counted
