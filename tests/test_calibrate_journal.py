"""The file of a calibration, from which it goes on."""

from __future__ import annotations

import json

import pytest
import torch
from calibrating import COUNTED
from tiny import snapshot

from agentsd import calibrate


@pytest.mark.parametrize("place", [1, 30])
def test_what_was_stopped_goes_on(plain, calibrated, tmp_path, place):
    """Before the table, and in the runs under a plan."""
    path, found, told = calibrated
    lines, before = path.read_text().splitlines(True), snapshot(plain.unet)
    part = tmp_path / "part.jsonl"
    part.write_text("".join(lines[: place + 1]) + lines[place + 1][:30])  # killed as it wrote a line

    def stop(done, total):
        if len(part.read_text().splitlines()) > place + 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(plain, ["a cat"], speedup=1.6, resume=part, on_step=stop, **COUNTED)
    assert snapshot(plain.unet) == before
    ticks = []
    again = calibrate(
        plain, ["a cat"], speedup=1.6, resume=part, on_step=lambda *step: ticks.append(step), **COUNTED
    )
    assert (again, again.measured) == (found, found.measured)
    assert (len(ticks), ticks[-1]) == (len(told), told[-1])
    assert sorted(part.read_text().splitlines()) == sorted(path.read_text().splitlines())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "was begun with seed=0, here it is 1"),
        ({"prompts": ["a car"]}, r"was begun with prompts=\['a cat'\], here it is \['a car'\]"),
        ({"height": 64}, "was begun with call.height=None, here it is 64"),
        ({"noisier": True}, "was begun with sampler_settings.beta_end=0.012, here it is 0.013"),
        ({"operators": ()}, r'was begun with operators=\["Merge'),
        ({"model": True}, "was begun with weights="),
    ],
)
def test_figures_of_something_else_are_refused(plain, figures, monkeypatch, changes, message):
    monkeypatch.setattr(type(plain), "__call__", lambda *args, **kwargs: pytest.fail("it was run"))
    if changes.pop("noisier", False):
        plain.scheduler.register_to_config(beta_end=0.013)
    if changes.pop("model", False):
        torch.nn.init.zeros_(plain.unet.conv_in.bias)
    with pytest.raises(ValueError, match=message + ".*: pass another file, or remove this one"):
        calibrate(plain, **{"prompts": ["a cat"], "speedup": 1.5, "resume": figures, **COUNTED} | changes)


@pytest.mark.parametrize("content", ["steps: 3\n", "[1]\n", "none", json.dumps({"of": 3}) + "\n{}\n"])
def test_a_file_of_another_kind_is_left_as_it_is(plain, tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"notes.txt' (is no calibration's|was begun with).*: pass another"):
        calibrate(plain, ["a cat"], speedup=1.5, resume=path)
    assert path.read_text() == content
    with pytest.raises(ValueError, match="Is a directory; pass a file's path"):
        calibrate(plain, ["a cat"], speedup=1.5, resume=tmp_path)
