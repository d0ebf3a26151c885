"""Where the time goes: exclusive parts that add up, and no trace of the watching."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from agentsd_eval.cost import breakdown
from agentsd_eval.cost.breakdown import REST, TOTAL, Clock, parts_of, watched
from agentsd_eval.errors import EvalError
from agentsd_eval.settings import ProfileSettings
from tiny import fingerprint


def busy(seconds: float) -> None:
    """Use the processor."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_a_part_within_a_part_is_charged_once() -> None:
    clock = Clock(torch.device("cpu"))
    with clock.running():
        busy(0.01)
        clock.enter("outer")
        busy(0.02)
        clock.enter("inner")
        busy(0.04)
        clock.leave()
        busy(0.02)
        clock.leave()
    assert set(clock.seconds) == {REST, "outer", "inner"}
    for part, least in ((REST, 0.01), ("outer", 0.04), ("inner", 0.04)):
        assert clock.seconds[part] >= least
    whole = clock.seconds["outer"] + clock.seconds["inner"]
    assert whole - clock.seconds["inner"] == pytest.approx(clock.seconds["outer"])


def test_watching_changes_nothing_and_leaves_no_trace(pipe: Any, sample: Any) -> None:
    unet = pipe.unet
    before, baseline = fingerprint(unet), sample(pipe)
    clock = Clock(torch.device("cpu"))
    with watched(unet, parts_of(unet, unet.config.sample_size), clock), clock.running():
        assert torch.equal(sample(pipe), baseline)
    assert fingerprint(unet) == before
    assert {part.split(",")[0] for part in clock.seconds} >= {"residual blocks", "self-attention core", REST}


def test_the_parts_of_each_method(pipe: Any) -> None:
    merged = {"recipe": {"attention": {"early": {"agents": {"stride": 2}}, "late": "downsample"}}}
    settings = ProfileSettings(
        methods=("paper", "merged", "limit"), named={"merged": merged}, repeats=1, ratio=0.5
    )
    methods = breakdown.methods_of(settings)
    ticks: list[None] = []
    cases = breakdown.cases_of(settings, pipe)
    early, late = breakdown.measure(pipe, cases, methods, settings, lambda: ticks.append(None))
    assert len(ticks) == 2 * len(methods) * 2
    for rows in (early, late):
        assert rows[-1]["part"] == TOTAL
        for method in methods:
            parts = sum(row[method.label] for row in rows[:-1])
            assert parts == pytest.approx(rows[-1][method.label])
    matching = next(row for row in early if row["part"] == "matching: rank")
    assert matching["baseline"] == matching["limit"] == 0 < matching["paper r=0.5"]


def test_baseline_may_be_left_out(pipe: Any) -> None:
    settings = ProfileSettings(methods=("paper",), phases=("early",), repeats=1, baseline=False)
    methods = breakdown.methods_of(settings)
    (rows,) = breakdown.measure(pipe, breakdown.cases_of(settings, pipe), methods, settings, lambda: None)
    label = methods[0].label
    assert [column.title for column in breakdown.columns_of(methods)] == ["part", "step", "px", label]
    assert rows[-1]["part"] == TOTAL
    assert [row[label] for row in rows[:-2]] == sorted((row[label] for row in rows[:-2]), reverse=True)
    with pytest.raises(EvalError, match="--no-baseline leaves no method"):
        breakdown.methods_of(ProfileSettings(methods=("baseline",), baseline=False))


def test_a_method_across_calls_is_refused() -> None:
    with pytest.raises(EvalError, match="deepcache saves whole U-Net calls"):
        breakdown.methods_of(ProfileSettings(methods=("deepcache",)))


@pytest.mark.parametrize(
    ("scale", "batch", "call"), [(7.5, 2, "one guided U-Net call"), (1, 1, "one U-Net call")]
)
def test_guidance_is_as_asked(pipe: Any, scale: float, batch: int, call: str) -> None:
    settings = ProfileSettings(methods=("baseline",), phases=("early",), repeats=1, guidance_scale=scale)
    seen = set()
    hook = pipe.unet.register_forward_pre_hook(lambda module, args: seen.add(args[0].shape[0]))
    cases = breakdown.cases_of(settings, pipe)
    (rows,) = breakdown.measure(pipe, cases, breakdown.methods_of(settings), settings, lambda: None)
    hook.remove()
    assert seen == {batch}
    assert call in breakdown.title_of(rows[0], settings)
