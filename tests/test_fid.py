"""Real FID beside pytorch-fid's own code, on seeded random weights; run with -m fid."""

import numpy as np
import pytest
import torch
from agentsd_eval.quality import features, metrics
from agentsd_eval.studies.fid import frechet_distance
from commands import invoke
from PIL import Image

pytestmark = pytest.mark.fid


@pytest.fixture(scope="module")
def fid_score():
    from pytorch_fid import fid_score

    return fid_score


@pytest.fixture(scope="module")
def network(fid_score):
    """Ours and pytorch-fid's network on random weights, which are the ones that are downloaded."""
    from pytorch_fid import inception

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inception, "load_state_dict_from_url", lambda *args, **kwargs: {})
        patch.setattr(torch.nn.Module, "load_state_dict", lambda self, state, **kwargs: None)
        torch.manual_seed(0)
        bare = inception.fid_inception_v3()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inception, "load_state_dict_from_url", lambda *args, **kwargs: bare.state_dict())
        theirs = inception.InceptionV3([inception.InceptionV3.BLOCK_INDEX_BY_DIM[2048]]).eval()
        yield features.load_network("inception", torch.device("cpu")), theirs


def test_features_are_those_of_pytorch_fid(fid_score, network, photographs, tmp_path):
    ours, theirs = network
    for size in ((50, 40), (51, 40)):  # pytorch-fid takes images of one size at a time
        paths = [path for path in sorted(photographs.glob("*.png")) if Image.open(path).size == size]
        assert len(paths) > 2
        expected = fid_score.get_activations(
            paths, theirs, batch_size=3, dims=2048, device=torch.device("cpu"), num_workers=0
        )
        found = features.features_of(ours, paths, tmp_path)
        assert expected.std() > 0
        assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def test_the_distance_is_pytorch_fids(fid_score, network):
    """On features of fewer dimensions: a root of a 2048 x 2048 product takes SciPy half a minute."""
    random = np.random.default_rng(0)
    first, second = random.normal(size=(60, 24)), 1.3 * random.normal(size=(80, 24)) + 0.2
    moments = [(part.mean(0), np.cov(part, rowvar=False)) for part in (first, second)]
    theirs = fid_score.calculate_frechet_distance(*moments[0], *moments[1])
    sample = metrics.FrechetSample(first, metrics.fit(second)).distance(np.arange(60))
    assert [sample, frechet_distance(first, second)] == pytest.approx([theirs] * 2, rel=1e-6)


def test_the_command_prints_fid(network, photographs, tmp_path, monkeypatch):
    ours, _ = network
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("agentsd_eval.studies.fid.load_network", lambda name, device: ours)
    assert "FID" in invoke("fid", photographs, photographs)
    kept = np.load(next(tmp_path.rglob("inception-*.npy")))
    paths = sorted(photographs.glob("*.png"))
    assert np.array_equal(kept, features.features_of(ours, paths, tmp_path / "again"))
