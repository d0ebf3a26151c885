"""What could hold a GPU back: how fast scenes are composed and encoded."""

from __future__ import annotations

import re
from itertools import accumulate
from pathlib import Path

import torch
import yaml
from agentsd_demo.training import rates

RECIPE = Path(__file__).parents[1] / "configs" / "demo_model_gpu.yaml"


def test_the_first_call_is_not_counted(monkeypatch):
    spent = iter(accumulate([0, 90, 1, 2, 1, 30, 1, 4]))  # calls of 90, 2, 30 and 4, with 1 between them
    monkeypatch.setattr(rates.time, "process_time", lambda: next(spent))
    assert rates.cpu_seconds(lambda: None, 3) == 4


def test_each_canvas_of_a_recipe_has_a_line(tmp_path, capsys):
    recipe = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    recipe["diffusion"]["stages"] = [{"until": 1.0, "sizes": {64: 0.5, 32: 0.5}}]
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    state = torch.random.get_rng_state()
    rates.main(path, images=1, repeats=1)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["32 px", "64 px"]
    for line in lines:
        assert re.search(r"encoding [\d.]+ ms, [\d.]+% of it and the step", line)
    assert torch.equal(torch.random.get_rng_state(), state)
