"""The field's scores of a finetuned subject, on tiny CLIP and DINO models, and a study of a real model."""

import commands
import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from agentsd_eval.errors import EvalError
from agentsd_eval.images.prompts import from_prompts
from agentsd_eval.research import subject_scores
from agentsd_eval.research.__main__ import main
from agentsd_eval.research.settings import SubjectSettings
from PIL import Image
from sd_folder import save_clip, save_dino
from transformers import AutoImageProcessor, CLIPModel, CLIPProcessor, ViTModel

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def clip(tokenizer, tmp_path_factory):
    return save_clip(tmp_path_factory.mktemp("clip"), tokenizer)


@pytest.fixture(scope="module")
def dino(tmp_path_factory):
    return save_dino(tmp_path_factory.mktemp("dino"))


def own(folder, photographs, **settings):
    words = {"instance_prompt": "a sks cat", "class_prompt": "a cat", "subject": photographs}
    return SubjectSettings.model_validate({"model": str(folder), **words, **settings})


def cosine(a, b):
    return float(torch.nn.functional.cosine_similarity(a, b, dim=-1))


def test_scores_are_the_mean_cosines_of_the_models_own_outputs(clip, dino, photographs):
    images = [Image.open(path) for path in sorted(photographs.glob("*.png"))]
    ours, views = images[:3], images[3:5]
    others = from_prompts(["a cat", "a dog"], 3, 0)
    settings = own("some/model", photographs, clip=str(clip), dino=str(dino))
    clip_i, dino_i, clip_t = scores = subject_scores.load_scores(settings, CPU)
    assert [score.name for score in scores] == ["clip_i", "dino", "clip_t"]

    model, processor = CLIPModel.from_pretrained(clip).eval(), CLIPProcessor.from_pretrained(clip)
    vit, vit_processor = ViTModel.from_pretrained(dino).eval(), AutoImageProcessor.from_pretrained(dino)
    prompts = [spec.prompt for spec in others]
    with torch.no_grad():
        output = model(**processor(text=prompts, images=images[:5], return_tensors="pt", padding=True))
        embeds = output.image_embeds
        tokens = vit(**vit_processor(images=images[:5], return_tensors="pt")).last_hidden_state[:, 0]
    for score, features in ((clip_i, embeds), (dino_i, tokens)):
        expected = [np.mean([cosine(features[i], features[j]) for j in (3, 4)]) for i in range(3)]
        found, of_views = score.features(ours), score.features(views)
        assert subject_scores.similarity(found, of_views) == pytest.approx(expected, abs=1e-5)
        among = cosine(features[3], features[4])
        assert subject_scores.similarity_among(of_views) == pytest.approx(among, abs=1e-5)
    expected = [max(0.0, cosine(embeds[i], output.text_embeds[i])) for i in range(3)]
    assert clip_t.fit(ours, others) == pytest.approx(expected, abs=1e-5)


def run(*words, code=0):
    AcceleratorState._reset_state(reset_partial_state=True)
    return commands.invoke("subject", *words, code=code, program=main)


@pytest.mark.slow
def test_a_real_model_is_scored_where_weights_are_given_and_else_says_so(
    model_folder, photographs, clip, dino, tmp_path
):
    words = ("--model", model_folder, "--subject", photographs, "--instance-prompt", "a sks cat")
    small = ("--train-steps", 1, "--steps", 2, "--class-images", 1, "--images", 2, "--other-prompts", 2)
    command = (*words, "--class-prompt", "a cat", *small, "--out", tmp_path)
    printed = run(*command)
    assert "No score of likeness was measured" in printed
    assert "--clip and --dino name" in printed
    assert "similarity" not in (tmp_path / "subject.md").read_text()
    printed = run(*command, "--clip", clip, "--dino", dino)  # the same images
    assert "CLIP-I" in printed
    *rows, ceiling = commands.rows_of(tmp_path / "subject.jsonl")
    assert all({"clip_i", "dino", "clip_t"} <= set(row) for row in rows)
    assert {"clip_i", "dino"} <= set(ceiling)
    assert len(list(tmp_path.rglob("manifest-0.jsonl"))) == len(rows)


def test_what_is_missing_is_told_before_any_training(model_folder, photographs, tmp_path):
    words = ("--model", model_folder, "--subject", photographs, "--class-prompt", "a")
    assert "give --instance-prompt" in run(*words, code=2)
    with pytest.raises(EvalError, match="can't load the DINO model"):
        subject_scores.load_scores(own("a/b", photographs, dino=str(tmp_path)), CPU)
