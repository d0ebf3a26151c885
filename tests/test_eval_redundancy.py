"""The redundancy map: Eq. 6 against a loop, its estimate, and the command on a tiny pipeline."""

from __future__ import annotations

import csv
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from agentsd_eval.cli import app
from agentsd_eval.errors import EvalError
from agentsd_eval.pictures.prompts import from_prompts
from agentsd_eval.settings import RedundancySettings
from agentsd_eval.studies import redundancy
from agentsd_eval.studies.divergence import MAX_SCORE, attention_map, js_score, js_score_sampled
from diffusers import DiTTransformer2DModel, HeunDiscreteScheduler
from PIL import Image
from tiny import BETAS, fingerprint, make_unet
from typer.testing import CliRunner

SETTINGS = RedundancySettings(steps=4, measured_steps=2, scheduler="model")
PICTURES = from_prompts(["a cat", "a dog"], 2, 0)


def loop_score(attention: torch.Tensor) -> float:
    """Eq. 4 to 6 to the letter: every head, every pair, Kullback-Leibler divergences in float64."""

    def kl(p: torch.Tensor, m: torch.Tensor) -> float:
        kept = p > 0
        return float((p[kept] * (p[kept].log() - m[kept].log())).sum())

    heads, tokens, _ = attention.shape
    total = 0.0
    for head in attention.double():
        for i in range(tokens - 1):
            for j in range(i + 1, tokens):
                mixed = (head[i] + head[j]) / 2
                total += (kl(head[i], mixed) + kl(head[j], mixed)) / 2
    return 2 * total / (heads * tokens * (tokens - 1))


def queries_and_keys(heads: int, tokens: int, width: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    query, key = torch.randn(2, heads, tokens, 8, generator=generator)
    return query * width, key


@pytest.mark.parametrize("width", [0.01, 0.3, 3.0, 30.0])
@pytest.mark.parametrize("tokens", [2, 3, 24])
def test_score_is_the_mean_over_all_pairs(tokens: int, width: float) -> None:
    attention = attention_map(*queries_and_keys(3, tokens, width))
    assert js_score(attention) == pytest.approx(loop_score(attention), abs=5e-7)


def test_score_of_wide_attention_does_not_depend_on_its_blocks(monkeypatch: Any) -> None:
    attention = attention_map(*queries_and_keys(2, 64, 1.0))
    whole = js_score(attention)
    monkeypatch.setattr("agentsd_eval.studies.divergence._CACHED", 64 * 5)
    assert js_score(attention) == pytest.approx(whole, abs=1e-7)


def test_known_scores() -> None:
    same = torch.tensor([[0.7, 0.2, 0.1]]).expand(1, 5, 3)
    assert js_score(same) == pytest.approx(0, abs=1e-9)
    assert js_score(torch.eye(16)[None]) == pytest.approx(math.log(2), abs=5e-7)
    # two of three rows are alike: two pairs of three are disjoint; the other head is alike
    rows = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    assert js_score(torch.stack([rows, rows[:1].expand(3, 2)])) == pytest.approx(math.log(2) / 3, abs=5e-7)


@pytest.mark.parametrize(("heads", "width"), [(1, 0.3), (4, 1.0), (3, 5.0)])
def test_sampled_score_is_near_the_exact_one(heads: int, width: float) -> None:
    query, key = queries_and_keys(heads, 96, width)
    exact = js_score(attention_map(query, key))
    estimates = []
    for seed in range(20):
        mean, error = js_score_sampled(query, key, 500, torch.Generator().manual_seed(seed))
        assert abs(mean - exact) < 4 * error
        estimates.append((mean, error))
    means, errors = torch.tensor(estimates, dtype=torch.float64).unbind(1)
    assert 0.5 < means.std() / errors.mean() < 1.7  # the error is that of the estimates
    assert js_score_sampled(query, key, 500, torch.Generator().manual_seed(0)) == estimates[0]


def test_sampling_never_pairs_a_query_with_itself() -> None:
    query = torch.eye(2)[None] * 100
    mean, error = js_score_sampled(query, query, 64, torch.Generator().manual_seed(0))
    assert (mean, error) == (pytest.approx(MAX_SCORE, abs=1e-6), pytest.approx(0, abs=1e-6))


def test_sampling_in_blocks_changes_nothing(monkeypatch: Any) -> None:
    query, key = queries_and_keys(2, 48, 1.0)
    whole = js_score_sampled(query, key, 100, torch.Generator().manual_seed(0))
    monkeypatch.setattr("agentsd_eval.studies.divergence._BLOCK", 48 * 7)
    parts = js_score_sampled(query, key, 100, torch.Generator().manual_seed(0))
    assert parts == pytest.approx(whole, abs=1e-6)


@pytest.mark.parametrize(
    ("steps", "measured", "expected"),
    [(50, 3, [0, 24, 49]), (50, 1, [0]), (4, 9, [0, 1, 2, 3]), (1, 10, [0]), (7, 6, [0, 1, 2, 3, 4, 6])],
)
def test_measured_steps_go_from_the_first_to_the_last(steps: int, measured: int, expected: list[int]) -> None:
    assert redundancy.steps_of(RedundancySettings(steps=steps, measured_steps=measured)) == expected


def test_scores_are_those_of_the_models_own_attention(pipe: Any) -> None:
    """Queries and keys recomputed by diffusers' own attention scores, in the last row of the batch."""
    maps: dict[str, torch.Tensor] = {}
    unet = pipe.unet
    layers = dict(unet.named_modules())
    inputs = torch.randn(2, 4, 8, 8), 500, torch.randn(2, 3, 16)

    def keep(attn: Any, args: tuple[torch.Tensor, ...]) -> None:
        query, key = (attn.head_to_batch_dim(to(args[0][1:])) for to in (attn.to_q, attn.to_k))
        name = next(name for name, layer in layers.items() if layer is attn)
        maps[name] = attn.get_attention_scores(query, key)

    hooks = [
        layer.register_forward_pre_hook(keep) for name, layer in layers.items() if name.endswith("attn1")
    ]
    with torch.no_grad(), redundancy.scored(unet, {0}, SETTINGS, torch.Generator()) as scores:
        unet(*inputs)
    for hook in hooks:
        hook.remove()
    assert len(scores) == len(maps) > 4
    for score in scores:
        assert score.nats == pytest.approx(loop_score(maps[score.site.name]), abs=1e-6)
        assert (score.tokens, score.exact) == (maps[score.site.name].shape[-1], True)


def test_a_dit_is_measured_too() -> None:
    dit = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=3, sample_size=8, patch_size=2
    ).eval()
    labels = {"timestep": torch.tensor([7]), "class_labels": torch.tensor([1])}
    with torch.no_grad(), redundancy.scored(dit, {0}, SETTINGS, torch.Generator()) as scores:
        dit(torch.randn(1, 4, 8, 8), **labels)
    assert [redundancy.short_name(score.site.name) for score in scores] == [
        f"transformer {number}" for number in range(3)
    ]
    assert {score.tokens for score in scores} == {16}


def test_measuring_leaves_the_pipeline_as_it_was(pipe: Any, sample: Any) -> None:
    before, processors, baseline = fingerprint(pipe.unet), pipe.unet.attn_processors, sample(pipe)
    with redundancy.scored(pipe.unet, {0}, SETTINGS, torch.Generator()):
        assert torch.equal(sample(pipe), baseline)

    def stop() -> None:
        raise KeyError

    redundancy.measure(pipe, PICTURES[:1], SETTINGS, lambda: None)
    with pytest.raises(KeyError):
        redundancy.measure(pipe, PICTURES[:1], SETTINGS, stop)
    assert fingerprint(pipe.unet) == before
    assert all(pipe.unet.attn_processors[key] is processor for key, processor in processors.items())
    assert torch.equal(sample(pipe), baseline)


@pytest.mark.parametrize("heun", [False, True])
def test_repeated_timesteps_are_one_step(make_pipeline: Any, heun: bool) -> None:
    pipe = make_pipeline(scheduler=HeunDiscreteScheduler(**BETAS, steps_offset=1) if heun else None)
    settings = SETTINGS.model_copy(update={"measured_steps": 9})
    rows = redundancy.measure(pipe, PICTURES[:1], settings, lambda: None)
    layers = {row["layer"] for row in rows}
    assert [row["step"] for row in rows] == sorted(list(range(4)) * len(layers))
    timesteps = list(dict.fromkeys(row["timestep"] for row in rows))
    assert timesteps == sorted(timesteps, reverse=True)
    assert len(timesteps) == 4


def test_a_row_is_the_mean_over_pictures(pipe: Any) -> None:
    settings = SETTINGS.model_copy(update={"exact_tokens": 64, "pairs": 50})
    rows = redundancy.measure(pipe, PICTURES, settings, lambda: None)
    assert redundancy.measure(pipe, PICTURES, settings, lambda: None) == rows
    first, second = (redundancy.measure(pipe, [p], settings, lambda: None) for p in PICTURES)
    for row, one, other in zip(rows, first, second, strict=True):
        assert row["pairs"] == ("sampled" if row["tokens"] > 64 else "exact")
        assert (row["standard_error"] > 0) == (row["tokens"] > 64)
        assert row["images"] == 2
        if row["pairs"] == "exact":
            assert row["score"] == pytest.approx((one["score"] + other["score"]) / 2, abs=1e-6)
    assert "Layers above 64 tokens: 50 pairs for each step and picture" in redundancy.note(rows, settings)


def test_thirds_of_the_steps() -> None:
    rows = [
        {"layer": f"l{level}", "level": level, "tokens": 4, "step": step, "score": level * step}
        for level in (2, 1)
        for step in (0, 3, 4, 9)
    ]
    means = redundancy.by_level(rows, 10)
    assert [list(mean.values()) for mean in means] == [
        ["level 1 (4 tokens)", 1, 1.5, 4, 9],
        ["level 2 (4 tokens)", 1, 3, 8, 18],
        ["all layers", 2, 2.25, 6, 13.5],
    ]
    assert redundancy.by_level(rows[:1], 10)[0]["last third"] is None


def invoke(*arguments: Any, code: int = 0) -> str:
    """Run the command; return what it printed, blanks made one."""
    result = CliRunner().invoke(app, ["redundancy", *(str(argument) for argument in arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return re.sub(r"\s+", " ", result.output)


def test_the_command_writes_figures_and_a_map(model_folder: str, tmp_path: Path) -> None:
    out = tmp_path / "new"
    printed = invoke(
        "--model", model_folder, "--prompt", "a cat", "--steps", 3, "--measured-steps", 2,
        "--exact-tokens", 100, "--pairs", 64, "--out", out,
    )  # fmt: skip
    assert "level 1 (256 tokens)" in printed
    assert "all layers" in printed
    assert "nats: 0 (all alike) to ln 2 = 0.693" in printed
    rows = [json.loads(line) for line in (out / "redundancy.jsonl").read_text().splitlines()]
    assert {(row["level"], row["span"], row["tokens"]) for row in rows} == {
        (1, 1, 256),
        (2, 2, 64),
        (3, 4, 16),
    }
    assert {row["step"] for row in rows} == {0, 2}
    assert all(0 <= row["score"] <= MAX_SCORE for row in rows)
    assert {row["pairs"] for row in rows if row["tokens"] == 256} == {"sampled"}
    facts = json.loads((out / "run.json").read_text())["results"]["redundancy"]
    assert (facts["settings"]["pairs"], facts["settings"]["prompts"]) == (64, ["a cat"])
    assert "torch" in facts["versions"]
    with (out / "redundancy.csv").open(newline="") as file:
        assert [float(row["score"]) for row in csv.DictReader(file)] == [row["score"] for row in rows]
    assert "| level 1 (256 tokens) | 3 |" in (out / "redundancy.md").read_text()
    with Image.open(out / "redundancy.png") as image:
        assert image.format == "PNG"
        assert image.size[0] == 1200


def test_one_step_of_one_layer_can_be_drawn(make_pipeline: Any) -> None:
    settings = RedundancySettings(steps=1, scheduler="ddim")
    rows = redundancy.measure(make_pipeline(), PICTURES[:1], settings, lambda: None)
    assert redundancy.draw(rows[:1], settings).startswith(b"\x89PNG")


def test_a_layer_of_one_token_is_named(make_pipeline: Any) -> None:
    settings = SETTINGS.model_copy(update={"height": 8, "width": 8})
    with pytest.raises(EvalError, match=r"attn1 has 1 token, no pair; choose a larger --height"):
        redundancy.measure(make_pipeline(), PICTURES[:1], settings, lambda: None)


def test_a_model_without_self_attention_is_refused() -> None:
    plain = make_unet(
        down_block_types=("DownBlock2D",) * 3, up_block_types=("UpBlock2D",) * 3, mid_block_type=None
    )
    context = redundancy.scored(plain, {0}, SETTINGS, torch.Generator())
    with pytest.raises(EvalError, match="no spatial self-attention to measure; use SD"), context:
        pass
    assert not plain._forward_pre_hooks


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--pairs", "1"), "pairs = 1: Input should be greater than or equal to 2"),
        (("--measured-steps", "0"), "measured_steps = 0: Input should be greater than or equal to 1"),
        (("--exact-tokens", "-1"), "exact_tokens = -1: Input should be greater than or equal to 0"),
        (("--images", "0"), "images = 0: Input should be greater than or equal to 1"),
        (("--out", "/proc/no/such"), "choose another place with --out"),
    ],
)
def test_wrong_settings_are_one_message_and_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    printed = invoke(*arguments, code=2)
    assert message in printed
    assert "Traceback" not in printed
