"""Features of images: of images that can be read, kept under their content where files can be written."""

import errno
import os
import shutil

import numpy as np
import pytest
from agentsd_eval.errors import EvalError
from agentsd_eval.files import image_files
from agentsd_eval.quality import features
from agentsd_eval.quality.features import Network, features_of
from commands import invoke
from PIL import Image

WHITE = [Image.new("RGB", (8, 8), "white")]
MEANS = Network("means", 8, lambda pixels: pixels.mean((2, 3)))


def test_features_are_kept_under_the_images_content_and_crop(photographs, tmp_path):
    calls = []
    network = Network("means", 8, lambda pixels: calls.append(len(pixels)) or pixels.mean((2, 3)))
    paths = sorted(photographs.glob("*.png"))
    asked = [(paths, None), (paths[:8], None), (paths, (32, 32))]
    first = [features_of(network, some, tmp_path, crop) for some, crop in asked]
    again = [features_of(network, some, tmp_path, crop) for some, crop in asked]
    assert calls == [9, 8, 9]
    assert [len(one) for one in first] == calls
    assert all(map(np.array_equal, first, again))
    kept = next(tmp_path.glob("*.npy"))
    kept.write_bytes(kept.read_bytes()[:100])  # cut off: made again
    for some, crop in asked:
        features_of(network, some, tmp_path, crop)
    assert len(calls) == 4


def test_a_place_that_cannot_be_written_is_told_before_features_are_computed(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    network = Network("means", 8, lambda pixels: pytest.fail("features were computed"))
    with pytest.raises(EvalError, match=r"can't write .*; choose another place with XDG_CACHE_HOME"):
        features_of(network, WHITE, features.user_cache() / "features")
    with pytest.raises(EvalError, match="choose another place with --out"):
        features_of(network, WHITE, tmp_path / "file" / "features")


def test_what_is_kept_is_read_where_nothing_can_be_written(tmp_path, monkeypatch):
    kept = features_of(MEANS, WHITE, tmp_path)
    monkeypatch.setattr(features, "check_writable", lambda *args: pytest.fail("it is not to be written"))
    assert np.array_equal(features_of(MEANS, WHITE, tmp_path), kept)


def test_features_that_do_not_fit_on_the_disk_leave_no_file(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(EvalError, match=r"the disk is full: .* run the same command again"):
        features_of(MEANS, WHITE, tmp_path / "features")
    monkeypatch.undo()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert np.array_equal(features_of(MEANS, WHITE, tmp_path / "features"), [[255, 255, 255]])


@pytest.mark.parametrize("count", [1, 2])
def test_fewer_than_three_real_images_are_refused(count, tmp_path):
    for number in range(count):
        WHITE[0].save(tmp_path / f"{number}.png")
    with pytest.raises(EvalError, match=rf"holds {count} images? \(.*; a distance needs 3 or more"):
        image_files(tmp_path)
    for words in (["fid", tmp_path, tmp_path], ["table", "--reference", tmp_path, "--out", tmp_path / "run"]):
        printed = invoke(*words, "--features", "efficientnet-lite0", code=2)
        assert "a distance needs 3 or more" in printed


def test_a_broken_image_is_named_before_anything_is_made(model_folder, photographs, tmp_path):
    real = shutil.copytree(photographs, tmp_path / "real")
    (real / "3.png").write_bytes((real / "3.png").read_bytes()[:200])
    words = ("--model", model_folder, "--reference", real, "--out", tmp_path / "run")
    printed = invoke("table", *words, code=2)
    assert "can't read the image" in printed
    assert "3.png" in printed
    assert not (tmp_path / "run" / "images").exists()
