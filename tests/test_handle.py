"""What `apply_agentsd` makes of its settings, and what its handle tells."""

import inspect

import pytest
from callers import Caller, equal, outputs
from logs import silent, warned
from recipes import AGENTS_CACHED, STEP_CACHING
from tiny import kept, make_unet

from agentsd import Agents, Downsample, Merge, Phases, Recipe, ResidualSharing, apply, apply_agentsd
from agentsd.recipe import AGENTSD, MODES


def test_handle_tells_its_settings(pipe):
    handle = apply_agentsd(pipe, 0.3, 0.05, -0.25, 0.6, seed=3)
    early = Agents(0.3, 0.05, -0.25, ranking="layer", at_most=None, agent_ratio=0.95)
    assert handle.recipe == Recipe(Phases(early, Merge(0.3, ranking="layer"), 0.6), levels=1, seed=3)
    assert repr(apply_agentsd(pipe, mode="fast")) == (
        "AgentSDHandle(Recipe(attention=Downsample(stride=4, at_most=None), levels=1, "
        "steps=StepCache(warmup_steps=3, late_interval=6), "
        "residual=ResidualSharing(warmup_steps=3, least_tokens=2304, interval_from=9216)), "
        f"{len(handle.layer_names)} layers)"
    )


def test_the_default_says_once_what_it_does(pipe):
    apply._warn_once._warned.clear()
    with warned('AgentSD changes images, as in the paper; mode="fast" keeps them'):
        apply_agentsd(pipe)
    with silent():
        apply_agentsd(pipe)
        apply_agentsd(pipe, mode="fast")


DEFAULTS = {"ratio": 0.4, "k": 0.075, "scale": -0.15, "early_frac": 0.4, "seed": 0}


@pytest.mark.parametrize("mode", MODES)
def test_a_default_that_is_shown_and_passed_changes_nothing(pipe, mode):
    assert apply_agentsd(pipe).recipe == AGENTSD
    parameters = inspect.signature(apply_agentsd).parameters
    assert {name: parameters[name].default for name in DEFAULTS} == DEFAULTS
    for source in ({"mode": mode}, {"recipe": MODES[mode]}):
        assert apply_agentsd(pipe, **source | DEFAULTS).recipe == MODES[mode]


@pytest.mark.parametrize("recipe", [AGENTSD, AGENTS_CACHED])
def test_a_handle_that_is_not_enabled_leaves_the_baseline(recipe):
    caller, handle = Caller(), apply_agentsd(unet := make_unet(), recipe=recipe)
    patched = outputs(unet, caller)
    handle.enabled = False
    assert equal(outputs(unet, caller), outputs(make_unet(), caller))
    assert not kept(handle)
    handle.enabled = True
    assert equal(outputs(unet, caller), patched)


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (Recipe(Phases(Agents(), None)), "o" * 4 + "f" * 6),
        (STEP_CACHING, "f" * 10),
        (Recipe(Downsample(32)), "f" * 10),  # no cell is whole
        (Recipe(Downsample(), residual=ResidualSharing(2, 2)), "ffsfsfsfsf"),
    ],
)
def test_what_attention_was_is_told(recipe, expected):
    handle = apply_agentsd(unet := make_unet(), recipe=recipe)
    outputs(unet, Caller())
    assert "".join(kind.attention[0] for kind in handle.last_run) == expected
