"""Every door of the package: what is wrong is named with the way out, and nothing is changed or lost."""

import sys

import pytest
import torch
from recipes import AGENTS_THEN_KEYS
from tiny import make_unet

from agentsd import Agents, Downsample, Merge, Phases, Recipe, apply_agentsd, remove_agentsd


def apply(**settings):
    return lambda: apply_agentsd(make_unet(), **settings)


def command(module, *words):
    """Run a command line in this process; its error output becomes the exception's text."""

    def run():
        import importlib

        argv, sys.argv = sys.argv, ["program", *words]
        try:
            importlib.import_module(module).main()
        finally:
            sys.argv = argv

    return run


def evaluate(*words):
    return command("agentsd_eval.cli", *words)


def dreambooth(*words):
    needed = ("--pretrained_model_name_or_path", "no/model", "--instance_prompt", "a sks cat")
    return command("agentsd.dreambooth.cli", *needed, "--instance_data_dir", "nowhere", *words)


TABLE = [
    (apply(ratio=1.0), "ratio=1.0: pass a share"),
    (apply(ratio="half"), "ratio='half' is a str: pass a float"),
    (apply(ratio=float("nan")), "ratio=nan: pass a finite number"),
    (apply(ratio=None), "ratio=None is a NoneType: pass a float"),
    (apply(k=-0.1), "k=-0.1: pass 0 to 1000"),
    (apply(scale=0.54), "scale=0.54: it is the exponent"),
    (apply(early_frac=40), "early_frac=40: pass a share"),
    (apply(mode="best"), "mode='best': choose 'agentsd' or 'downsample' or"),
    (apply(mode=None), "mode=None: choose"),
    (apply(mode="downsample", ratio=0.5), "ratio=0.5: this recipe has no ratio, leave it out"),
    (apply(mode="downsample", early_frac=0.5), "early_frac=0.5: this recipe has no early_frac"),
    (apply(recipe=Recipe(Agents(), levels=7)), "levels=7: UNet2DConditionModel has attention on 3 levels"),
    (apply(seed=-1), "seed=-1: pass an integer in [0, 2**63)"),
    (apply(seed=1.5), "seed=1.5 is a float: pass a int"),
    (apply(recipe="nowhere"), "nowhere: no such file"),
    (apply(recipe=3), "recipe=3 is a int: pass a Recipe, or its file or folder"),
    (apply(recipe=AGENTS_THEN_KEYS, ratio=0.1), "pass it alone"),
    (apply(recipe=AGENTS_THEN_KEYS, mode="paper"), "pass it alone"),
    (lambda: Phases("agents", None), "early='agents' is a str: pass"),
    (lambda: Phases(Agents(), Agents()), "early and late are both Agents("),
    (lambda: Recipe(), "attention=None: the recipe would do nothing"),
    (lambda: Recipe("agents"), "'agents' is a str: pass Phases, ByDistance or"),
    (lambda: Recipe(Agents(), levels=0), "levels=0: pass 1 (the finest attention level) or more"),
    (lambda: Merge(stride=1), "stride=1: pass 2 or more"),
    (lambda: Agents(destinations="last"), "destinations='last': choose 'auto' or 'random' or 'first'"),
    (lambda: Downsample(at_most=0), "at_most=0: pass 1 or more, or None"),
    (lambda: apply_agentsd("model"), "str has no U-Net"),
    (lambda: apply_agentsd(torch.nn.Linear(1, 1)), "Linear has no U-Net"),
    (lambda: remove_agentsd(None), "NoneType has no U-Net"),
    (lambda: Recipe.load("nowhere"), "nowhere: no such file; Recipe.save(path) writes one"),
    (evaluate("compare", "--methods", "tomesdd"), "tomesdd"),
    (evaluate("compare", "--ratio", "1.5"), "1.5"),
    (evaluate("compare", "--agent", "speed=1"), "speed"),
    (evaluate("compare", "--agent", "k"), "KEY=VALUE"),
    (evaluate("compare", "--model", "/nowhere/model"), "nowhere"),
    (evaluate("latency", "--sizes", "100"), "100"),
    (evaluate("table", "--config", "nowhere.yaml"), "nowhere.yaml"),
    (evaluate("report", "nowhere"), "nowhere"),
    (dreambooth(), "nowhere is not a folder"),
    (dreambooth("--resolution", "33"), "resolution=33"),
    (dreambooth("--scale", "0.54"), "scale=0.54"),
    (dreambooth("--max_train_steps", "0"), "max_train_steps=0"),
    (dreambooth("--with_prior_preservation"), "class_data_dir"),
]


@pytest.mark.parametrize(("wrong", "message"), TABLE)
def test_bad_input(wrong, message, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((Exception, SystemExit)) as caught:
        wrong()
    said = str(caught.value)
    if isinstance(caught.value, SystemExit):
        assert caught.value.code not in (0, None)
        said = " ".join("".join(capfd.readouterr()).split())
    assert message in said
    assert "Traceback" not in said
    assert not list(tmp_path.rglob("*.png"))
