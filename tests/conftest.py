"""Tiny real pipelines, built from configs with random weights; nothing is downloaded.

Libraries are imported where they are used: the process that hands out tests under `-n` needs none of them.
"""

import copy
import inspect
import os
import shutil
from functools import partial

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # small tensors; read when torch is imported, children too

# Machines were met that report AMX and die of it (SIGILL in bfloat16).
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")


def pytest_ignore_collect(collection_path, config):
    """Under `-m gpu` read only files with such tests: others import what a machine with a GPU may lack."""
    if config.option.markexpr != "gpu" or not collection_path.name.startswith("test_"):
        return None
    return True if "mark.gpu" not in collection_path.read_text(encoding="utf-8") else None


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """A CLIP tokenizer that spells words letter by letter."""
    from tiny import make_tokenizer

    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def make_pipeline(tokenizer):
    """Build a tiny pipeline, StableDiffusionPipeline by default, with parts of one's own if given."""
    from diffusers import StableDiffusionPipeline
    from tiny import make_scheduler, make_text_encoder, make_unet, make_vae

    def build(unet=None, scheduler=None, cls=None, **parts):
        own = copy.deepcopy(tokenizer)  # textual inversion adds words to it
        common = {
            "vae": make_vae(),
            "text_encoder": make_text_encoder(own),
            "tokenizer": own,
            "unet": unet or make_unet(),
            "scheduler": scheduler or make_scheduler(),
        }
        cls = cls or StableDiffusionPipeline
        unused = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
        taken = inspect.signature(cls.__init__).parameters
        pipe = cls(**common | {name: value for name, value in unused.items() if name in taken} | parts)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    return build


@pytest.fixture
def pipe(make_pipeline):
    return make_pipeline()


@pytest.fixture(scope="session")
def sample():
    """`draw`, of which agentsd has nothing to say."""
    from callers import draw
    from logs import silent

    def run(pipe, seed=0, **changes):
        with silent():
            return draw(pipe, seed, **changes)

    return run


@pytest.fixture(scope="session")
def model_folder(make_pipeline, tmp_path_factory):
    """A tiny pipeline on disk, as `--model` takes it."""
    folder = tmp_path_factory.mktemp("model")
    make_pipeline().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def photographs(tmp_path_factory):
    """Nine images of noise, of two sizes."""
    import numpy as np
    from PIL import Image

    folder = tmp_path_factory.mktemp("photographs")
    random = np.random.default_rng(0)
    for i in range(9):
        pixels = random.integers(0, 255, (40, 50 + i % 2, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
    return folder


@pytest.fixture(scope="session")
def run_config_in(model_folder, photographs):
    """Settings of a DreamBooth run of two steps in a folder, changed by keywords."""
    from agentsd.dreambooth.config import DreamBoothConfig

    def make(folder, **changes):
        base = {
            "pretrained_model_name_or_path": model_folder,
            "instance_data_dir": photographs,
            "instance_prompt": "a sks cat",
            "class_data_dir": folder / "class",
            "class_prompt": "a cat",
            "num_class_images": 3,
            "output_dir": folder / "out",
            "max_train_steps": 2,
            "learning_rate": 1e-3,
            "num_inference_steps": 2,
            "num_validation_images": 1,
            "use_8bit_adam": False,
            "report_to": None,
        }
        return DreamBoothConfig(**base | changes)

    return make


@pytest.fixture
def run_config(run_config_in, tmp_path):
    """The same in a folder of the test's own."""
    return partial(run_config_in, tmp_path)


@pytest.fixture(scope="session")
def browser():
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.fail("no Chromium is installed: apt-get install chromium")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(params=[(1280, 900), (390, 844)], ids=["desktop", "phone"])
def screen(request):
    width, height = request.param
    return {"width": width, "height": height}


@pytest.fixture(scope="session")
def make_plain(make_pipeline):
    """Makes a pipeline of three self-attention layers, with one U-Net call in each step."""
    from callers import ddim
    from tiny import make_small_unet

    return lambda: make_pipeline(make_small_unet(), ddim(steps_offset=1))


@pytest.fixture
def plain(make_plain):
    return make_plain()


@pytest.fixture(scope="session")
def calibrated(make_plain, tmp_path_factory):
    """The file of a calibration, and its recipe."""
    from agentsd_eval import calibrate
    from calibrating import COUNTED

    path = tmp_path_factory.mktemp("calibrated") / "figures.jsonl"
    return path, calibrate(make_plain(), ["a cat"], speedup=1.3, resume=path, **COUNTED)


@pytest.fixture
def figures(calibrated, tmp_path):
    return shutil.copy(calibrated[0], tmp_path / "figures.jsonl")
