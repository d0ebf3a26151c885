"""Intervals hold the truth as often as they say; captions are drawn whole; few images have none."""

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from agentsd_eval.images.prompts import from_prompts
from agentsd_eval.intervals import FEWEST, drawn, enough, half, interval, standard_error
from agentsd_eval.pages import plots, quality_table
from agentsd_eval.quality import metrics
from agentsd_eval.quality.gain import Line, gain
from agentsd_eval.quality.measure import Judge, row_of
from agentsd_eval.quality.summary import summary_of
from agentsd_eval.research import metric_validation, subject_table
from agentsd_eval.studies import table

FIGURES = runpy.run_path(str(Path(__file__).parents[1] / "docs/figures.py"))


def mean_of(values):
    return lambda counts: counts @ values / counts.sum(1)


@pytest.mark.parametrize("each", [1, 4], ids=["a caption each", "four images a caption"])
@pytest.mark.parametrize("captions", [30, 64])
def test_of_a_hundred_intervals_ninety_five_hold_the_truth(captions, each):
    """Images of one caption are alike: drawn by themselves they would hold it in some 65."""
    random, hit, alone = np.random.default_rng(1), 0, 0
    names = [str(i) for i in range(captions) for _ in range(each)]
    for _ in range(400):
        values = np.repeat(random.normal(size=captions), each) + 0.3 * random.normal(size=captions * each)
        low, high = interval(mean_of(values), names) or (1, 0)
        hit += low <= 0 <= high
        low, high = interval(mean_of(values), range(len(values))) or (1, 0)
        alone += low <= 0 <= high
    assert 0.93 <= hit / 400 <= 0.975
    assert each == 1 or alone / 400 < 0.8


@pytest.mark.parametrize(("units", "t"), [(30, 2.04523), (64, 1.99834), (1000, 1.96234)])
def test_half_an_interval_is_students(units, t):
    assert half(2.0, units) == pytest.approx(2 * t, rel=1e-3)


def test_a_caption_is_drawn_with_all_its_images():
    counts = drawn(["a", "b", "a", "c", "b", "a"], 500)
    assert counts.shape == (500, 6)
    assert (counts[:, [0, 2, 5]] == counts[:, :1]).all()
    assert (counts[:, 1] == counts[:, 4]).all()
    assert (counts[:, 0] + counts[:, 1] + counts[:, 3] == 3).all()
    assert counts.mean(0) == pytest.approx(np.ones(6), abs=0.15)


def test_a_standard_error_is_that_over_captions():
    """By hand: of captions' sums, as if each were one image."""
    values = np.array([1.0, 2, 4, 8])
    assert standard_error(values) == pytest.approx(values.std(ddof=1) / 2)
    twice, names = np.repeat(values, 2), [name for name in "abcd" for _ in range(2)]
    assert standard_error(twice, names) == pytest.approx(values.std(ddof=1) / 2)
    assert standard_error(twice) < standard_error(twice, names)


def test_so_are_the_errors_of_distances():
    """Each image twice says nothing more than once, as far as the error goes."""
    random = np.random.default_rng(0)
    once, real = random.normal(size=(40, 4)), random.normal(size=(200, 4))
    names = [str(i) for i in range(40) for _ in range(2)]
    twice, gaussian = np.repeat(once, 2, 0), metrics.fit(real)
    moved = twice + random.normal(0, 0.5, (40, 4)).repeat(2, 0)
    own = metrics.kernel_distance(twice, real, names)
    far = np.full_like(own.without_real, own.without_real.mean())  # as if of the reference there were no end

    def errors(captions):
        pair = [metrics.FrechetSample(x, gaussian, captions) for x in (moved, twice)]
        kernel = metrics.KernelDistance(own.value, own.without_generated, far, captions)
        return metrics.frechet_difference_error(*pair), kernel.error

    (frechet, kernel), (frechet_by_image, kernel_by_image) = errors(names), errors(None)
    assert frechet > 1.2 * frechet_by_image
    assert kernel == pytest.approx(2**0.5 * kernel_by_image, rel=0.02)


ROW = {
    "method": "fast", "label": "fast", "reference_distance": 0.2, "reference_distance_low": 0.1,
    "reference_distance_high": 0.3, "gain_seconds": 1.5, "gain_seconds_low": 1.2, "gain_seconds_high": 1.8,
    "gain_seconds_beyond": None, "kid": 0.1, "kid_error": 0.01, "fd": 3.0, "fd_change": 1.0,
    "fd_change_error": 0.1, "macs": 50,
}  # fmt: skip


@pytest.mark.parametrize("images", [None, 640], ids=["images", "captions"])
@pytest.mark.parametrize("count", [8, 29, 30])
def test_below_thirty_no_page_has_an_interval(images, count):
    row = ROW | ({"images": images, "captions": count} if images else {"images": count})
    told = count >= FEWEST
    assert enough(row) == told
    tables = quality_table.tables_of([row], {"features": "efficientnet-lite0", "model": "demo"}, "CPU")
    cells = [column.text(row) for columns in tables.values() for column in columns]
    assert bool(re.search(r"±|\(\d", " ".join(cells))) == told
    base = row | {"method": "baseline", "label": "baseline", "reference_distance": 0.3, "macs": 100}
    axes = plots.frontier([base, base | {"method": "baseline@5", "macs": 40}, row]).axes[0]
    assert any(one.has_yerr for one in axes.containers) == told
    kinds = ("gain-range", "distance-range", "fd-change")
    text = " ".join(FIGURES["KINDS"][kind](row, {}) for kind in kinds)
    assert bool(re.search(r"±|\(\d", text)) == told


@pytest.mark.parametrize("count", [8, 30])
def test_nor_has_a_subjects(count):
    row = {"variant": "a", "images": count, "other_images": count, "clip_i": 0.5, "clip_i_error": 0.1}
    row |= {"clip_i_change": 0.1, "clip_i_change_error": 0.01, "clip_t": 0.5, "clip_t_error": 0.1}
    columns = [column for columns in subject_table.tables_of([row]).values() for column in columns]
    assert ("±" in " ".join(column.text(row) for column in columns)) == (count == 30)


@pytest.mark.parametrize("count", [29, 30])
@pytest.mark.parametrize("each", [1, 3])
def test_nor_has_a_row(count, each):
    random = np.random.default_rng(0)
    singles = [
        {"method": name, "prompt": f"p{i}", "reference_distance": random.uniform(1, 2) / far}
        for name, far in (("baseline", 4), ("baseline@5", 2), ("fast", 3))
        for i in range(count)
        for _ in range(each)
    ]
    costs = {"baseline": 100, "baseline@5": 50, "fast": 50}
    rows = [{"method": name, "key": name, "macs": macs, "speedup": 1.0} for name, macs in costs.items()]
    table.add_gain(rows, singles)
    assert (rows[2]["gain_macs_low"] is not None) == (count == 30)
    own = [single for single in singles if single["method"] == "fast"]
    found = summary_of(own, None)
    assert ("reference_distance_low" in found) == (count == 30)
    logs = np.log([single["reference_distance"] for single in own])
    assert found["reference_distance"] == pytest.approx(np.exp(logs.mean()))
    if count == 30:
        wide = np.log(found["reference_distance_high"] / found["reference_distance_low"]) / 2
        error = standard_error(logs, [single["prompt"] for single in own])
        assert wide == pytest.approx(half(error, 30), rel=0.1)
    pair = metric_validation.ratio(np.exp(logs), 2 * np.exp(logs), [one["prompt"] for one in own])
    assert pair.verdict == ("seen" if count == 30 else "fewer than 30 images")


def test_a_judge_knows_the_captions(monkeypatch):
    random, asked = np.random.default_rng(0), from_prompts(["a cat", "a dog"], 6, 0)
    judge, real = object.__new__(Judge), random.normal(size=(9, 3))
    judge.real, judge.gaussian, judge.kernels = real, metrics.fit(real), metrics.KernelSet(real)
    judge.network, judge.scenes = SimpleNamespace(name="any"), False
    monkeypatch.setattr(Judge, "_each", lambda *args: [{"prompt": spec.prompt} for spec in asked])
    shown = SimpleNamespace(key="a", features=random.normal(size=(6, 3)), images=[None] * 6)
    found = judge.measure(shown, asked)
    assert found.kid.captions == found.frechet.captions == [spec.prompt for spec in asked]
    assert {key: row_of(found, found)[key] for key in ("images", "captions")} == {"images": 6, "captions": 2}


def test_a_gain_is_drawn_by_captions():
    random = np.random.default_rng(0)
    own, other = (np.exp(np.repeat(random.normal(size=40), 4)) for _ in range(2))
    names = [str(i) for i in range(40) for _ in range(4)]
    line = Line(np.array([1.0, 9.0]), np.stack([other, other / 10]))
    ends = [gain(own, 1.0, [line], captions) for captions in (names, ())]
    assert ends[0].value == ends[1].value
    assert ends[0].high - ends[0].low > 1.5 * (ends[1].high - ends[1].low)


def test_no_page_of_docs_has_an_interval_of_few():
    """By the committed rows themselves, whichever table shows them."""
    few = set()
    for run in FIGURES["RUNS"]:
        rows = FIGURES["rows_of"](run).values()
        images = [row["images"] for row in rows if row.get("reference_distance") is not None]
        if images and max(images) < FEWEST:
            few.add(run)
    assert {"benchmark-9216", "benchmark-16384"} <= few
    for name, content in FIGURES["TABLES"].items():
        if content["run"] in few:
            assert not re.search(r"\d \(\d|±", FIGURES["table"](name)), name
