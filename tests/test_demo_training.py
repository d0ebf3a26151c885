"""The recipe that makes the toy model: its networks, losses, scenes and loop."""

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from agentsd_demo import load_pipeline, load_references
from agentsd_demo.data import caption_of, trained_concepts
from agentsd_demo.pipeline_io import check_export
from agentsd_demo.scenes import random_scene, triples
from agentsd_demo.training import autoencoder, diffusion
from agentsd_demo.training import train as recipe
from agentsd_demo.training.config import (
    AutoencoderConfig,
    DemoConfig,
    DiffusionConfig,
    LoopConfig,
    load_config,
)
from agentsd_demo.training.diffusion import shared_suffix, tokenize
from agentsd_demo.training.loop import CHECKPOINT, lr_factor, train_loop
from PIL import Image
from torch import nn


@pytest.fixture(scope="module")
def pipe():
    return load_pipeline()


@pytest.fixture(scope="module")
def micro(tmp_path_factory):
    """Two concepts and networks of a few channels."""
    names = sorted({reference.concept for reference in load_references()})[:2]
    loop = {"batch": 2, "bf16": False, "compile": False, "log_every": 1, "warmup": 1, "lr": 1e-3}
    loop["stages"] = [{"until": 1.0, "sizes": {32: 1.0}}]
    sizes = {"channels": (8, 8), "text_width": 16, "text_layers": 1, "text_heads": 2, "vocab_size": 600}
    folder = tmp_path_factory.mktemp("micro")
    return DemoConfig.model_validate(
        {
            "run_dir": folder / "run",
            "export_dir": folder / "export",
            "concepts": names,
            "autoencoder": {**loop, "steps": 2, "channels": (8, 8)},
            "diffusion": {**loop, "steps": 4, **sizes, "grid_every": 4},
        }
    )


def test_the_shipped_recipe_is_valid_and_an_unknown_concept_stops_one_before_it_trains():
    config = load_config(Path(__file__).parents[1] / "configs/demo_model.yaml")
    assert len({r.concept for r in load_references(concepts=config.concepts)}) == len(config.concepts)
    with pytest.raises(ValueError, match="a word of nonsense"):
        recipe.Recipe.of(DemoConfig(concepts=("a word of nonsense",)))


def test_the_learning_rate_rises_and_falls_to_nothing():
    assert lr_factor(0, 0.0, 10) == pytest.approx(0.1)
    assert lr_factor(10, 0.0, 10) == 1
    assert lr_factor(10, 0.5, 10) == pytest.approx(0.5)
    assert lr_factor(10, 1.0, 10) == pytest.approx(0, abs=1e-12)


def _train_line(folder, factor=lambda step: 1.0):
    """Fit a line in 12 steps, the loss of each times a factor."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)

    def loss_at(generator, step):
        x = torch.randn(4, 3, generator=generator)
        return factor(step) * (model(x) - x.sum(1, keepdim=True)).square().mean()

    config = LoopConfig(steps=12, lr=0.1, bf16=False, warmup=2)
    train_loop(model, loss_at, config, folder, seed=1, device=torch.device("cpu"))
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_gradients_that_are_not_finite_end_training_before_the_weights(tmp_path):
    """As cuDNN's attention gave them on an H200; the checkpoint holds the steps before."""
    with pytest.raises(RuntimeError, match="non-finite"):
        _train_line(tmp_path, lambda step: 1.0 if step < 2 else torch.nan)
    state = torch.load(tmp_path / CHECKPOINT, weights_only=True)
    assert state["step"] == 2
    assert all(weights.isfinite().all() for weights in state["model"].values())


def test_an_interrupted_run_resumes_to_the_same_weights(tmp_path):
    def interrupt(step):
        if step == 5:
            raise KeyboardInterrupt
        return 1.0

    whole = _train_line(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        _train_line(tmp_path / "cut", interrupt)
    assert torch.load(tmp_path / "cut" / CHECKPOINT, weights_only=True)["step"] == 5
    assert torch.equal(_train_line(tmp_path / "cut"), whole)


def test_the_recipe_runs_from_images_to_a_pipeline(micro, tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "GRID_PROMPTS", 2)
    monkeypatch.setattr(recipe, "GRID_SIZE", 32)
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(micro.model_dump(mode="json")))
    recipe.main(path)
    pipe = load_pipeline(folder=micro.export_dir)
    assert set(trained_concepts(micro.export_dir)) == set(micro.concepts)
    assert (micro.run_dir / "diffusion" / "grid_000004.png").exists()
    before = torch.load(micro.run_dir / "diffusion" / CHECKPOINT, weights_only=True)
    recipe.main(path)  # the budget is spent: nothing is trained again
    after = torch.load(micro.run_dir / "diffusion" / CHECKPOINT, weights_only=True)
    assert after["step"] == before["step"] == 4
    assert all(torch.equal(before["model"][k], after["model"][k]) for k in before["model"])

    # A new round can start from an export alone, and keeps its autoencoder.
    second = micro.model_copy(update={"run_dir": tmp_path / "run", "init_from": micro.export_dir})
    second = second.model_copy(update={"export_dir": tmp_path / "export", "autoencoder": None})
    path.write_text(yaml.safe_dump(second.model_dump(mode="json")))
    recipe.main(path)
    again = load_pipeline(folder=second.export_dir)
    weights = zip(pipe.vae.parameters(), again.vae.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in weights)
    assert pipe.tokenizer.get_vocab() == again.tokenizer.get_vocab()
    assert not torch.equal(pipe.unet.conv_in.weight, again.unet.conv_in.weight)

    # An autoencoder of another factor can take the place of the start's.
    deeper = micro.autoencoder.model_copy(update={"channels": (8, 8, 8), "teacher": micro.export_dir})
    second = second.model_copy(update={"run_dir": tmp_path / "deeper", "autoencoder": deeper})
    path.write_text(yaml.safe_dump(second.model_dump(mode="json")))
    recipe.main(path)
    third = load_pipeline(folder=second.export_dir)
    assert (pipe.vae_scale_factor, third.vae_scale_factor) == (2, 4)
    assert Image.open(second.run_dir / "diffusion" / "grid_000004.png").height == 32


def test_a_caption_shares_its_words_after_the_style(pipe):
    """The oracle finds them by the text: what follows the style reads the same at both positions."""
    seen = load_references()[:40]
    styled = tokenize(pipe.tokenizer, [r.caption for r in seen])
    styleless = tokenize(pipe.tokenizer, [caption_of(r.concept, None) for r in seen])
    at = shared_suffix(styled, styleless)
    assert torch.equal(styled.gather(1, at[0]), styleless.gather(1, at[1]))
    for reference, row, starts in zip(seen, styled, at[:, :, 0].T, strict=True):
        words = pipe.tokenizer.decode(row[starts[0] :], skip_special_tokens=True)
        assert reference.caption.endswith(words)
        assert words.endswith(reference.concept)
        assert at[0, 0, -1] < len(row)


def test_normalised_latents_decode_to_the_same_images():
    torch.manual_seed(0)
    vae = autoencoder.build_autoencoder(AutoencoderConfig(channels=(8, 8))).eval()
    pixels = autoencoder.to_pixels([reference.image for reference in load_references()[:8]])
    before = autoencoder.decode(vae, autoencoder.encode(vae, pixels))
    std = vae.encode(pixels).latent_dist.std / autoencoder.encode(vae, pixels).std((0, 2, 3))[:, None, None]
    autoencoder.normalise_latents(vae, pixels)
    latents = autoencoder.encode(vae, pixels)
    torch.testing.assert_close(latents.mean((0, 2, 3)), torch.zeros(4), atol=1e-4, rtol=0)
    torch.testing.assert_close(latents.std((0, 2, 3)), torch.ones(4), atol=1e-3, rtol=0)
    torch.testing.assert_close(autoencoder.decode(vae, latents), before, atol=1e-4, rtol=0)
    torch.testing.assert_close(vae.encode(pixels).latent_dist.std, std, atol=1e-4, rtol=1e-3)


def test_an_autoencoder_of_one_level_more_starts_with_its_teachers_deep_levels():
    teacher = autoencoder.build_autoencoder(AutoencoderConfig(channels=(32, 64)))
    teacher.register_to_config(scaling_factor=0.9)
    larger = autoencoder.build_autoencoder(AutoencoderConfig(channels=(32, 32, 64)))
    autoencoder.inherit_weights(larger, teacher)
    assert larger.config.scaling_factor == 0.9
    features, latents = torch.randn(1, 32, 16, 16), torch.randn(1, 4, 8, 8)
    with torch.no_grad():
        for level in (0, 1):
            expected = teacher.encoder.down_blocks[level](features)
            assert torch.equal(larger.encoder.down_blocks[level + 1](features), expected)
            features = expected
        hidden = [vae.decoder.mid_block(vae.decoder.conv_in(latents)) for vae in (teacher, larger)]
        blocks = (vae.decoder.up_blocks[0] for vae in (teacher, larger))
        assert torch.equal(*(block(h) for block, h in zip(blocks, hidden, strict=True)))


def test_a_teachers_latents_are_those_of_the_smaller_image():
    """The oracle averages blocks of 2 x 2 pixels by hand; the posterior's noise is left out."""
    torch.manual_seed(0)
    config = AutoencoderConfig(channels=(8, 8, 8), latent_weight=0.3)
    teacher = autoencoder.build_autoencoder(AutoencoderConfig(channels=(8, 8))).eval()
    larger = autoencoder.build_autoencoder(config).eval()
    pixels, noise = torch.rand(2, 3, 32, 32) * 2 - 1, torch.zeros(2, 4, 8, 8)
    smaller = pixels.unflatten(3, (16, 2)).unflatten(2, (16, 2)).mean((3, 5))
    with torch.no_grad():
        plain = autoencoder.AutoencoderLoss(larger, config)(pixels, noise)
        taught = autoencoder.AutoencoderLoss(larger, config, teacher)(pixels, noise)
        distance = autoencoder.encode(larger, pixels) - autoencoder.encode(teacher, smaller)
    torch.testing.assert_close(taught - plain, 0.3 * distance.square().mean())


def test_crops_are_pieces_of_scenes_and_a_pure_function_of_their_seed():
    fox, star = (triples(concepts=[concept]) for concept in ("fox face", "star"))
    once, again = (autoencoder.draw_crops("a", 4, 64, fox, star, share=0.5) for _ in range(2))
    assert once.shape == (4, 3, 64, 64)
    assert torch.equal(once, again)
    for share, among in ((0.0, fox), (1.0, star)):
        crops = autoencoder.draw_crops("a", 12, 128, fox, star, share)
        scenes = autoencoder.to_pixels([random_scene(f"a/{i}", 128, among=among).image for i in range(12)])
        whole = (crops == scenes).all((1, 2, 3)).sum()
        assert 1 <= whole <= 8  # those on the smallest canvas


def test_the_loss_weights_bound_the_signal_to_noise_ratio(pipe):
    config = DemoConfig().diffusion
    weights = diffusion.DiffusionLoss(pipe.unet, pipe.text_encoder, config).weights
    alphas = diffusion.build_scheduler().alphas_cumprod.double()
    snr = alphas / (1 - alphas) + 1
    expected = torch.minimum(snr, torch.tensor(config.snr_gamma)) / snr
    torch.testing.assert_close(weights.double(), expected, rtol=1e-4, atol=1e-6)


def test_training_scenes_are_a_pure_function_of_the_step():
    """The oracle composes each scene by its name; other processes compose the same."""
    stages = ({"until": 0.5, "sizes": {64: 1.0}}, {"until": 1.0, "sizes": {64: 0.3, 96: 0.7}})
    config = DiffusionConfig(steps=40, batch=2, stages=stages, workers=1)
    among = triples("seen")[:5]
    batches = list(islice(diffusion.SceneBatches(among, config, seed=3).ahead(18), 6))
    for step, (shown, pixels) in enumerate(batches, start=18):
        size = pixels.shape[1]
        scenes = [random_scene(f"train/3/{step}/{i}", size, among=among) for i in range(2)]
        assert shown == [scene.triple for scene in scenes]
        assert all((np.asarray(s.image) == p.numpy()).all() for s, p in zip(scenes, pixels, strict=True))
    sizes = [diffusion.canvas_size(config, step, seed=3) for step in range(40)]
    assert set(sizes[:20]) == {64}
    assert set(sizes[20:]) == {64, 96}
    assert [pixels.shape[1] for _, pixels in batches] == sizes[18:24]


def test_an_export_replaces_no_other_folder(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "holiday.jpg").touch()
    with pytest.raises(ValueError, match="photos is no exported pipeline and stays as it is"):
        check_export(tmp_path / "photos")
    check_export(tmp_path / "none")
