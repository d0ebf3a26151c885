import json

import numpy as np
import pytest
from agentsd_eval.cli import app
from agentsd_eval.quality.metrics import kernel_distance
from agentsd_eval.settings import ProofSettings
from agentsd_eval.studies import proof, table
from agentsd_eval.studies.table import Measured
from PIL import Image
from typer.testing import CliRunner


@pytest.mark.parametrize(
    ("factor", "verdict"), [(2.0, "seen"), (0.5, "out of order"), (1.0, "not told apart")]
)
def test_a_ratio_is_seen_beyond_its_interval(factor, verdict):
    rng = np.random.default_rng(0)
    less = np.exp(rng.normal(0, 2, 40))  # seeds differ far more than the losses do
    link = proof.ratio(less, less * factor * np.exp(rng.normal(0, 0.1, 40)))
    assert link.value == pytest.approx(factor, rel=0.05)
    assert link.verdict == verdict


def test_a_difference_is_that_of_the_kernel_distances():
    rng = np.random.default_rng(0)
    real, near = rng.normal(size=(60, 8)), rng.normal(size=(40, 8))
    less, more = kernel_distance(near, real), kernel_distance(near + 1, real)
    link = proof.difference(less, more)
    assert link.value == pytest.approx(1e3 * (more.value - less.value))
    assert link.verdict == "seen"
    assert proof.difference(more, less).verdict == "out of order"


def test_links_are_neighbours_by_every_measure_that_both_have():
    singles = [
        {"method": key, "reference_distance": distance, "baseline_distance": None if key == "a" else distance}
        for key, distance in (("a", 1.0), ("b", 2.0), ("c", 8.0))
        for _ in range(3)
    ]
    rows = proof.links_of(Measured([], singles, {}, {}), {"x": ["a", "b", "c"]})
    assert [(r["less"], r["more"], r["measure"], r["value"]) for r in rows] == [
        ("a", "b", "to reference image", pytest.approx(2)),
        ("b", "c", "to reference image", pytest.approx(4)),
        ("b", "c", "to the baseline", pytest.approx(4)),
    ]


def test_chains_go_from_least_to_most_loss_and_baseline_runs_once():
    methods, chains = proof.rivals(ProofSettings(steps=25, chain_steps=(50, 25, 12)))
    assert [m.name for m in methods[:3]] == ["baseline", "baseline@50", "baseline@12"]
    assert chains["steps"][1] == methods[0].key
    assert len(methods) == len(set(methods)) == 3 + 3 + 4
    assert proof.HARM_CHAINS["noise"] == ["noise 4", "noise 10", "noise 25"]


def test_harms_are_of_their_strength():
    grey = Image.new("RGB", (64, 64), (128, 128, 128))
    assert np.asarray(proof.HARMS["noise 10"](grey), float).std() == pytest.approx(10, rel=0.05)
    half = Image.new("RGB", (64, 64))
    half.paste((255, 255, 255), (32, 0, 64, 64))
    profile = np.diff(np.asarray(proof.HARMS["blur 2"](half), float)[32, :, 0])
    assert (profile * np.arange(63)).sum() / profile.sum() == pytest.approx(31, abs=0.5)
    assert np.sqrt((profile * (np.arange(63) - 31) ** 2).sum() / profile.sum()) == pytest.approx(2, abs=0.4)


def test_the_command_writes_a_link_a_line(model_folder, photographs, tmp_path, monkeypatch):
    """Without a look at what the methods cost."""
    monkeypatch.delattr(table, "macs")
    monkeypatch.delattr(table, "measure_memory")
    (tmp_path / "prompts.txt").write_text("a cat\na dog\n")
    arguments = [
        "proof", "--model", model_folder, "--prompts", tmp_path / "prompts.txt", "--reference", photographs,
        "--steps", 4, "--reference-steps", 6, "--chain-steps", 4, "--chain-steps", 2, "--images", 4,
        "--out", tmp_path / "out",
    ]  # fmt: skip
    result = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    links = [json.loads(line) for line in (tmp_path / "out" / "proof.jsonl").read_text().splitlines()]
    assert Image.open(tmp_path / "out" / "proof.png").width > 500
    assert {link["chain"] for link in links} == {"steps", "tomesd", "DeepCache", "blur", "noise"}
    blurred = [link for link in links if (link["chain"], link["measure"]) == ("blur", "to the baseline")]
    assert [link["verdict"] for link in blurred] == ["seen", "seen"]
