"""Every Python block of README and docs runs, on tiny pipelines; every command of ours in them parses."""

import functools
import importlib.util
import json
import re
import shlex
import shutil
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import agentsd_eval
import pytest
import torch
from agentsd_eval.calibration.search import calibrate
from agentsd_eval.cli import main as evaluation
from agentsd_eval.presets import load_settings
from agentsd_eval.research.__main__ import main as research
from calibrating import CANDIDATES
from diffusers import DiffusionPipeline, StableDiffusionPipeline
from peft.utils import get_peft_model_state_dict
from pipelines import build_host, load_lora

from agentsd.command_line import settings_of
from agentsd.dreambooth.cli import dreambooth, dreambooth_lora
from agentsd.recipe import AGENTSD

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    str(page.relative_to(ROOT))
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
)
ELSEWHERE = {  # pages whose blocks another test runs, and holds to more
    "docs/how_to/coming_from.md": "test_coming_from.py",
    "docs/how_to/serve.md": "test_docs.py",
    "CONTRIBUTING.md": "test_operator_page.py",
}
STEPS, SIDE = 8, 32  # of each image; what the pages ask for would take minutes


def fenced(page, language):
    """A page's blocks of a language."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


RUN_HERE = [
    pytest.param(page, marks=[pytest.mark.slow] * page.endswith("calibrate.md"), id=page)
    for page in PAGES
    if fenced(page, "python") and page not in ELSEWHERE
]


@pytest.fixture
def workplace(make_pipeline, model_folder, tmp_path, monkeypatch):
    """A folder with the models, LoRA weights and recipes that the pages name; no GPU, and short runs."""
    monkeypatch.chdir(tmp_path)
    for name in ("stable-diffusion-v1-5/stable-diffusion-v1-5", "dreambooth-sd15"):
        shutil.copytree(model_folder, name)
    load_lora(trained := make_pipeline())
    for name in ("my-lora", "dreambooth-lora"):
        weights = get_peft_model_state_dict(trained.unet, adapter_name="style")
        StableDiffusionPipeline.save_lora_weights(name, unet_lora_layers=weights)
    for name in ("dreambooth-sd15", "dreambooth-lora"):
        AGENTSD.save(Path(name))
    monkeypatch.setitem(sys.modules, "agentsd_demo", SimpleNamespace(load_pipeline=make_pipeline))
    monkeypatch.setattr(DiffusionPipeline, "to", lambda pipe, *args, **more: pipe)
    monkeypatch.setattr(agentsd_eval, "calibrate", short_calibration, raising=False)
    monkeypatch.setattr(StableDiffusionPipeline, "__call__", shortened(StableDiffusionPipeline.__call__))
    return tmp_path


def shortened(call):
    """A pipeline's call of few steps and small images."""

    @functools.wraps(call)
    def run(pipe, *args, **more):
        return call(pipe, *args, **more | {"num_inference_steps": STEPS, "height": SIDE, "width": SIDE})

    return run


def short_calibration(*args, **more):
    """`calibrate` of two recipes in place of 40, in few steps."""
    few = {"candidates": CANDIDATES[:2], "num_inference_steps": STEPS, "speedup": 1.1}
    return calibrate(*args, **more | few)


@pytest.mark.parametrize("page", RUN_HERE)
def test_the_blocks_of_a_page_run(page, workplace, make_pipeline, make_plain, tokenizer):
    """In turn, with what earlier ones made; each gets a new `pipe`, unless the page itself makes one."""
    names, blocks = {}, fenced(page, "python")
    own = any(re.search(r"^pipe = ", block, re.MULTILINE) for block in blocks)
    for block in blocks:
        if "pipe.controlnet" in block:
            names["pipe"], _ = build_host(make_pipeline, tokenizer, "ControlNet")
        elif not own:
            names["pipe"] = make_plain() if "calibrate" in block else make_pipeline()
        exec(compile(block, page, "exec"), names)
    for recipe in fenced(page, "json"):  # of the recipe that a block before wrote
        assert json.loads(recipe) == json.loads((workplace / "mine.json").read_text())
    torch.compiler.reset()


@pytest.mark.parametrize("page", ELSEWHERE)
def test_the_other_pages_are_run_by_the_tests_that_are_named(page):
    assert Path(page).name in (ROOT / "tests" / ELSEWHERE[page]).read_text(encoding="utf-8")


def commands(page):
    """The commands of a page's blocks, and those within its sentences."""
    text = (ROOT / page).read_text(encoding="utf-8")
    inline = re.findall(
        r"`((?:agentsd-|python |accelerate |bash |pip )[^`]+)`", re.sub(r"(?s)```.*?```", "", text)
    )
    lines = "\n".join([*fenced(page, "bash"), *inline]).replace("\\\n", " ").splitlines()
    return [
        words
        for line in lines
        for part in line.split("&&")
        if (words := [word for word in shlex.split(part, comments=True) if word != "..."])
    ]


COMMANDS = sorted({shlex.join(words): words for page in PAGES for words in commands(page)}.items())
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def check_command(words):
    """A command of ours has such options and settings; others name files and extras that are there."""
    words = [word.removeprefix(".venv/bin/") for word in words if word != "--help"]
    for extra in re.findall(r"\.\[([\w,]+)\]", " ".join(words)):
        assert set(extra.split(",")) <= set(EXTRAS)
    for word in words:
        if re.fullmatch(r"(configs|eval|demo|docs|tests|\.ci)/[\w./]+", word):
            assert (ROOT / word).exists(), word
    program, *options = words
    while program in ("accelerate", "launch", "python", "-m") and options:
        program, *options = options
    groups = {"agentsd-eval": evaluation, "agentsd_eval.cli": evaluation, "agentsd_eval.research": research}
    scripts = dict.fromkeys(["agentsd-dreambooth", "agentsd.dreambooth"], dreambooth)
    scripts |= dict.fromkeys(["agentsd-dreambooth-lora", "agentsd.dreambooth.lora"], dreambooth_lora)
    if program in scripts:
        scripts[program].make_context(program, options)  # it fails for an unknown option
    elif program in groups and options and options[0] in ("COMMAND", "NAME", "--list-configs"):
        assert len(options) == 1
    elif program in groups and options:
        command = groups[program].commands[options[0]]
        given = command.make_context(command.name, options[1:]).params
        if len(options) > 1:  # else a command's name in a sentence
            config = given.pop("config", None)
            load_settings(command.kind, config, settings_of(given))
    elif program.startswith("agentsd") and "-" not in program:
        assert importlib.util.find_spec(program), program  # a module of ours to run


@pytest.mark.parametrize("words", [words for _, words in COMMANDS], ids=[line[:60] for line, _ in COMMANDS])
def test_a_command_of_a_page_parses(words, tmp_path, monkeypatch):
    """Folders and files that it names as examples are made."""
    monkeypatch.chdir(tmp_path)
    results = "agentsd-results/mine", "agentsd-results/first"
    for folder in ("FOLDER", "FOLDER_OR_HUB_ID", "IMAGES", "my-dog", *results):
        (tmp_path / folder).mkdir(parents=True)
        for file in ("model_index.json", "0.png", "1.png", "2.png"):  # of a model, or of images
            (tmp_path / folder / file).touch()
    (tmp_path / "prompts.txt").write_text("a cat\n")
    AGENTSD.save(tmp_path / "mine.json")
    (tmp_path / "eval").symlink_to(ROOT / "eval")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    check_command(words)


def test_commands_are_found_and_wrong_ones_are_told():
    assert sum(words[0].startswith("agentsd-eval") for _, words in COMMANDS) >= 8
    with pytest.raises(SystemExit):
        check_command(["agentsd-eval", "table", "--metods", "fast"])
    with pytest.raises(KeyError):
        check_command(["agentsd-eval", "tabel", "--images", "3"])
