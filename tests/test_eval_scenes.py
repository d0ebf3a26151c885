import numpy as np
import pytest
from agentsd_demo.accuracy import efficientnet_lite0
from agentsd_demo.reading import ConceptReader
from agentsd_demo.scenes import Triple, compose, random_scene, triples
from agentsd_eval.quality.scenes import fresh_scenes, measures_of, place_distance, read_pictures, wasserstein

CONCEPTS = ["strawberry", "panda face", "banana"]


def test_fresh_scenes_are_always_the_same_and_none_that_training_draws():
    once, again = (fresh_scenes(CONCEPTS, 64, 8) for _ in range(2))
    assert [s.box for s in once] == [s.box for s in again]
    among = triples(concepts=CONCEPTS)
    trained = [random_scene(f"train/0/{step}/{i}", 64, among=among) for step in range(4) for i in range(8)]
    pixels = {scene.image.tobytes() for scene in trained}
    assert not pixels & {scene.image.tobytes() for scene in once}


def test_what_a_scene_shows_is_read_and_what_it_does_not_is_wrong():
    shown = Triple("strawberry", "3d", "blue")
    scene = compose(shown, 3, 96)
    reader = ConceptReader(CONCEPTS, efficientnet_lite0(), views=1)
    asked = [shown, Triple("banana", "3d", "blue"), Triple("strawberry", "3d", "red")]
    right, fruit, colour = read_pictures([scene.image] * 3, asked, reader)
    left, top, side = scene.box
    assert [right[key] for key in ("right", "right_style", "right_colour")] == [True, True, True]
    assert (fruit["right"], fruit["right_colour"]) == (False, True)
    assert (colour["right"], colour["right_colour"]) == (True, False)
    assert right["x"] == pytest.approx(left + side / 2, abs=5)
    assert right["y"] == pytest.approx(top + side / 2, abs=5)
    assert right["side"] <= side


def test_sprites_all_in_the_middle_are_far_from_scattered_ones():
    fresh = measures_of([s.image for s in fresh_scenes(CONCEPTS, 96, 200)])
    others = measures_of(
        [random_scene(f"o/{i}", 96, among=triples(concepts=CONCEPTS)).image for i in range(200)]
    )
    still = np.tile([48.0, 48.0, 40.0], (200, 1))
    assert place_distance(others, fresh)[0] < 3 < 6 < place_distance(still, fresh)[0]


@pytest.mark.parametrize("sizes", [(7, 7), (5, 12), (1, 30)])
def test_wasserstein_is_the_area_between_the_quantile_functions(sizes):
    rng = np.random.default_rng(0)
    a, b = (rng.normal(i, 1 + i, size) for i, size in enumerate(sizes))
    grid = (np.arange(200_000) + 0.5) / 200_000
    quantile = [np.sort(s)[(grid * len(s)).astype(int)] for s in (a, b)]
    assert wasserstein(a, b) == pytest.approx(np.abs(quantile[0] - quantile[1]).mean(), rel=1e-3)


def test_a_shift_is_its_distance():
    a = np.random.default_rng(0).normal(size=9)
    assert wasserstein(a, a + 2.5) == pytest.approx(2.5)
    assert wasserstein(a, a) == 0
