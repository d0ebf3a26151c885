"""The field's scores of a finetuned subject, on tiny CLIP and DINO models, and a study of a real model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from agentsd_eval.errors import EvalError
from agentsd_eval.images.prompts import from_prompts
from agentsd_eval.research import subject_scores
from agentsd_eval.research.__main__ import main
from agentsd_eval.research.settings import SubjectSettings
from click.testing import CliRunner
from PIL import Image
from sd_folder import save_clip, save_dino
from transformers import AutoImageProcessor, CLIPModel, CLIPProcessor, ViTModel

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def clip(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_clip(tmp_path_factory.mktemp("clip"), tokenizer)


@pytest.fixture(scope="module")
def dino(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_dino(tmp_path_factory.mktemp("dino"))


def own(folder: Path | str, photographs: Path, **settings: Any) -> SubjectSettings:
    words = {"instance_prompt": "a sks cat", "class_prompt": "a cat", "subject": photographs}
    return SubjectSettings.model_validate({"model": str(folder), **words, **settings})


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a, b, dim=-1))


def test_scores_are_the_mean_cosines_of_the_models_own_outputs(
    clip: Path, dino: Path, photographs: Path
) -> None:
    images = [Image.open(path) for path in sorted(photographs.glob("*.png"))]
    ours, views = images[:3], images[3:5]
    others = from_prompts(["a cat", "a dog"], 3, 0)
    settings = own("some/model", photographs, clip=str(clip), dino=str(dino))
    clip_i, dino_i, clip_t = scores = subject_scores.load_scores(settings, CPU)
    assert [score.name for score in scores] == ["clip_i", "dino", "clip_t"]

    model, processor = CLIPModel.from_pretrained(clip).eval(), CLIPProcessor.from_pretrained(clip)
    vit, vit_processor = ViTModel.from_pretrained(dino).eval(), AutoImageProcessor.from_pretrained(dino)
    with torch.no_grad():
        output = model(
            **processor(
                text=[spec.prompt for spec in others],
                images=images[:5],
                return_tensors="pt",
                padding=True,
            )
        )
        embeds = output.image_embeds
        tokens = vit(**vit_processor(images=images[:5], return_tensors="pt")).last_hidden_state[:, 0]
    for score, features in ((clip_i, embeds), (dino_i, tokens)):
        expected = [
            np.mean([cosine(features[i], features[j]) for j in (3, 4)]) for i in range(3)
        ]  # each image to the two views
        found, of_views = score.features(ours), score.features(views)
        assert subject_scores.similarity(found, of_views) == pytest.approx(expected, abs=1e-5)
        among = subject_scores.similarity_among(of_views)
        assert among == pytest.approx(cosine(features[3], features[4]), abs=1e-5)
    expected = [max(0.0, cosine(embeds[i], output.text_embeds[i])) for i in range(3)]
    assert clip_t.fit(ours, others) == pytest.approx(expected, abs=1e-5)


def run(*arguments: Any, code: int = 0) -> str:
    AcceleratorState._reset_state(reset_partial_state=True)
    done = CliRunner().invoke(main, ["subject", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == code, done.output
    return re.sub(r"\s+", " ", done.output)


@pytest.mark.slow
def test_a_real_model_is_scored_where_weights_are_given_and_else_says_so(
    model_folder: str, photographs: Path, clip: Path, dino: Path, tmp_path: Path
) -> None:
    words = ("--model", model_folder, "--subject", photographs, "--instance-prompt", "a sks cat")
    small = ("--train-steps", 1, "--steps", 2, "--class-images", 1, "--images", 2, "--other-prompts", 2)
    command = (*words, "--class-prompt", "a cat", *small, "--out", tmp_path)
    printed = run(*command)
    assert "No score of likeness was measured" in printed
    assert "--clip and --dino name" in printed
    assert "similarity" not in (tmp_path / "subject.md").read_text()
    printed = run(*command, "--clip", clip, "--dino", dino)  # the same images
    assert "CLIP-I" in printed
    rows = [json.loads(line) for line in (tmp_path / "subject.jsonl").read_text().splitlines()]
    assert all({"clip_i", "dino", "clip_t"} <= set(row) for row in rows[:-1])
    assert {"clip_i", "dino"} <= set(rows[-1])
    assert len(list(tmp_path.rglob("manifest-0.jsonl"))) == len(rows) - 1


def test_what_is_missing_is_told_before_any_training(
    model_folder: str, photographs: Path, tmp_path: Path
) -> None:
    assert "subject: the bundled subject is for the toy model; give --subject" in run(
        "--model", model_folder, code=2
    )
    printed = run("--model", model_folder, "--subject", photographs, "--class-prompt", "a", code=2)
    assert "give --instance-prompt" in printed
    with pytest.raises(EvalError, match="can't load the DINO model"):
        subject_scores.load_scores(own("a/b", photographs, dino=str(tmp_path)), CPU)
