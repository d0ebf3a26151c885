from itertools import pairwise

import numpy as np
import pytest
import torch
from agentsd_demo.scenes import compose, triples
from agentsd_demo.training import accuracy
from agentsd_eval.quality.features import efficientnet_lite0, load_network
from agentsd_eval.quality.perceptual import PerceptualFeatures, StageFeatures, stage_distance
from agentsd_eval.quality.scenes import scene_reader
from efficientnet_lite_pytorch import EfficientNet
from PIL import Image, ImageChops, ImageFilter


@pytest.fixture(scope="module")
def features():
    return StageFeatures(torch.device("cpu"))


def test_what_the_judge_has_of_the_network_is_loaded_once(monkeypatch):
    """Features, perceptual distances and the reader of scenes."""
    loads, load = [], EfficientNet.from_name
    monkeypatch.setattr(EfficientNet, "from_name", lambda name: loads.append(load(name)) or loads[-1])
    cpu = torch.device("cpu")
    efficientnet_lite0.cache_clear()
    network, stages, reader = (load_network("efficientnet-lite0", cpu), StageFeatures(cpu), scene_reader(cpu))
    assert reader is not None
    assert len(loads) == 1
    monkeypatch.undo()
    grey = Image.new("RGB", (64, 64), (128, 128, 128))
    pixels = (torch.full((1, 3, 224, 224), 128.0) - 127) / 128
    with torch.inference_mode():
        expected = accuracy.load_efficientnet_lite0().extract_features(pixels).mean((2, 3))
    assert torch.equal(torch.from_numpy(network([grey])), expected)
    assert len(stages([grey])) == 5


@pytest.fixture(scope="module")
def scenes():
    chosen = triples(concepts=["panda face", "strawberry", "rocket"])[::14]
    return [compose(triple, i, 64).image for i, triple in enumerate(chosen)]


def blurred(image, radius):
    return image.filter(ImageFilter.GaussianBlur(radius))


def noisy(image, sigma):
    noise = np.random.default_rng(0).normal(0, sigma, (image.height, image.width, 3))
    return Image.fromarray((np.asarray(image) + noise).clip(0, 255).astype(np.uint8))


def shifted(image, pixels):
    return ImageChops.offset(image, pixels, 0)


def mosaic(image, side):
    small = image.resize((image.width // side, image.height // side), Image.Resampling.BOX)
    return small.resize(image.size, Image.Resampling.NEAREST)


@pytest.mark.parametrize(
    ("harm", "strengths"),
    [(blurred, (0.5, 1, 2)), (noisy, (4, 10, 25)), (shifted, (1, 3, 8)), (mosaic, (2, 4, 8))],
)
def test_it_rises_with_every_harm(features, scenes, harm, strengths):
    clean = features(scenes)
    rising = [stage_distance(clean, features([harm(s, x) for s in scenes])) for x in strengths]
    assert (rising[0] > 0).all()
    for less, more in pairwise(rising):
        assert (less < more).all()


def test_equal_images_have_none_and_opposite_features_four(features, scenes):
    stages = features(scenes[:2])
    assert stage_distance(stages, stages).tolist() == [0, 0]
    torch.testing.assert_close(stage_distance(stages, [-s for s in stages]), torch.full((2,), 4.0))


def test_it_is_the_mean_over_places_and_stages_of_squared_differences():
    a = [torch.tensor([[[[1.0, 1.0]], [[0.0, 0.0]]]]), torch.tensor([[[[1.0]], [[0.0]]]])]
    b = [torch.tensor([[[[1.0, 0.0]], [[0.0, 1.0]]]]), torch.tensor([[[[0.6]], [[0.8]]]])]
    assert stage_distance(a, b).item() == pytest.approx(((0 + 2) / 2 + (0.16 + 0.64)) / 2)


def test_stages_are_the_last_outputs_at_their_strides(features, scenes):
    stages = features(scenes[:1])
    assert [stage.shape[2:] for stage in stages] == [(s, s) for s in (112, 56, 28, 14, 7)]
    assert stages[-1].norm(dim=1).sub(1).abs().max() < 1e-5


def test_looks_are_the_same_distances_in_batches_of_half_precision(features, scenes):
    many = (scenes * 12)[:20]
    harmed = [blurred(image, 1) for image in many]
    found = PerceptualFeatures(features, many).distance(PerceptualFeatures(features, harmed))
    exact = stage_distance(features(many[17:18]), features(harmed[17:18])).item()
    assert len(found) == 20
    assert found[17] == pytest.approx(exact, rel=1e-2)
