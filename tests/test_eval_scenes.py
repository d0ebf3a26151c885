from agentsd_demo.reading import ConceptReader
from agentsd_demo.scenes import Triple, compose, random_scene, triples
from agentsd_demo.training.accuracy import efficientnet_lite0
from agentsd_eval.quality.scenes import fresh_scenes, read_scenes
from PIL import Image

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
    asked = [shown, Triple("banana", "3d", "blue")]
    assert read_scenes([scene.image] * 2, asked, reader) == [True, False]
    assert read_scenes([Image.new("RGB", (96, 96))], [shown], reader) == [False]  # there is nothing to read
