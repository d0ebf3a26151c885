"""CONTRIBUTING's operator in one file: short, run as it is written, and compared with a loop."""

import importlib
import re
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from callers import attention_by_hand
from tiny import call, make_unet

from agentsd import Agents, Phases, Recipe, apply_agentsd, recipe

PAGE = Path(__file__).parents[1] / "CONTRIBUTING.md"


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The block under the heading as a module of its own; what it registers is forgotten afterwards."""
    section = PAGE.read_text(encoding="utf-8").split("\n## Adding an operator\n")[1].split("\n## ")[0]
    [block] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert 20 < len(block.splitlines()) <= 60
    (tmp_path / "operator_of_the_page.py").write_text(block, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(recipe, "OPERATORS", dict(recipe.OPERATORS))
    yield importlib.import_module("operator_of_the_page")
    del sys.modules["operator_of_the_page"]


def averages(x, height, width, stride):
    """The mean of each cell of tokens, of what there is of it at the border."""
    rows = []
    for top, left in product(range(0, height, stride), range(0, width, stride)):
        inside = product(range(top, min(top + stride, height)), range(left, min(left + stride, width)))
        rows.append(x[:, [y * width + z for y, z in inside]].double().mean(1))
    return torch.stack(rows, 1)


@pytest.mark.parametrize(("size", "stride"), [((15, 13), 2), ((7, 16), 3)])
def test_a_layer_attends_to_averages(page, size, stride):
    unet = make_unet()
    attn = unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1
    seen = {}
    attn.register_forward_hook(lambda m, args, out: seen.update(x=args[0], out=out))
    baseline = call(unet, size=size)
    with apply_agentsd(unet, recipe=Recipe(page.AverageKeys(stride))):
        assert not torch.equal(call(unet, size=size), baseline)
    with torch.no_grad():
        expected = attention_by_hand(attn, seen["x"], averages(seen["x"], *size, stride))
    torch.testing.assert_close(seen["out"].double(), expected, rtol=0, atol=1e-6)
    assert torch.equal(call(unet, size=size), baseline)


def test_it_is_an_operator_like_the_packages_own(page, tmp_path):
    phases = Recipe(Phases(page.AverageKeys(4), Agents()))
    assert Recipe.load(phases.save(tmp_path)) == phases
    assert '"average_keys"' in (tmp_path / recipe.FILE_NAME).read_text()
    unet = make_unet()
    with apply_agentsd(unet, recipe=tmp_path):
        early, late = call(unet, 999), call(unet, 1)
    with apply_agentsd(unet, recipe=Recipe(page.AverageKeys(4))):
        assert torch.equal(call(unet, 999), early)
        assert not torch.equal(call(unet, 1), late)
    with pytest.raises(ValueError, match="stride=1: pass 2 or more"):
        page.AverageKeys(1)
    with pytest.raises(TypeError, match="stride='2': pass a whole number"):
        page.AverageKeys("2")
