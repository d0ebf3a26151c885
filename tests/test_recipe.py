"""Recipes: what is checked when they are made, their files, and layers that run each its own."""

import copy
import json
import math
import os
import pickle
from dataclasses import replace

import numpy as np
import pytest
from recipes import AGENTS_THEN_KEYS
from tiny import make_unet

from agentsd import ByDistance, Phases, Recipe, ResidualSharing, StepCache, apply_agentsd
from agentsd.attention import Agents, Downsample, Merge, PooledAgents
from agentsd.modules import AgentModule, AttnZero, FocusedLinear
from agentsd.recipe import AGENTSD, MODES

POOLED = (PooledAgents(4), PooledAgents(16))


def test_defaults_are_the_papers():
    agents = Agents()
    assert (agents.ratio, agents.k, agents.scale, agents.stride) == (0.4, 0.075, -0.15, 4)
    early, late = AGENTSD.attention.stages
    assert early == replace(agents, at_most=None, agent_ratio=0.95, ranking="layer")
    assert (late.ratio, late.stride, late.ranking) == (0.4, 2, "layer")
    assert (AGENTSD.attention.early_frac, AGENTSD.levels) == (0.4, 1)
    # Eq. 7 to 9 of the mediators' paper have no residual, and the usual scale
    assert (PooledAgents().k, PooledAgents().scale) == (0.0, -0.5)


@pytest.mark.parametrize(
    ("kind", "name", "value", "error", "way_out"),
    [
        (Agents, "ratio", 0.95, ValueError, "pass 0 to 0.9375, as each cell keeps a token"),
        (Merge, "ratio", 0.76, ValueError, "pass 0 to 0.75, as"),
        (Agents, "ratio", math.nan, ValueError, "finite"),
        (Agents, "ratio", "0.4", TypeError, "pass a number"),
        (Agents, "ratio", True, TypeError, "pass a number"),
        (Agents, "k", -1, ValueError, "0 to 1000"),
        (Agents, "scale", 0.54, ValueError, "exponent of the head width"),
        (Agents, "agent_ratio", 0, ValueError, r"\(0, 1\)"),
        (Agents, "stride", 1, ValueError, "2 or more"),
        (Downsample, "stride", 2.0, TypeError, "pass a whole number"),
        (Agents, "at_most", 0, ValueError, "1 or more, or None"),
        (Agents, "ranking", "model", ValueError, "'level' or 'layer'"),
        (Agents, "destinations", "last", ValueError, "'first'"),
        (PooledAgents, "count", 0, ValueError, "1 or more, or None"),
        (FocusedLinear, "convolution", "no", TypeError, "pass True or False"),
        (Recipe, "levels", 0, ValueError, "1 "),
        (Recipe, "measured", 3, ValueError, "figures by name"),
        (Recipe, "steps", 3, TypeError, r"pass StepCache\(\) or None"),
        (StepCache, "interval", 0, ValueError, "pass 2"),
        (StepCache, "extrapolation_order", 2, ValueError, r"pass 0 \(keep\) or 1"),
        (StepCache, "warmup_steps", 0, ValueError, "pass 1 or more"),
        (StepCache, "layers", -1, ValueError, "pass 1"),
        (ResidualSharing, "interval", 0, ValueError, "pass 2"),
        (ResidualSharing, "warmup_steps", 0, ValueError, "pass 1"),
        (ResidualSharing, "extrapolation_order", 2, ValueError, "pass 0"),
        (ResidualSharing, "least_tokens", -1, ValueError, "pass 0"),
    ],
)
def test_bad_value_names_itself_and_the_way_out(kind, name, value, error, way_out):
    other = {"attention": Agents()} if kind is Recipe else {}
    with pytest.raises(error, match=rf"{name}=.*{way_out}") as caught:
        kind(**other | {name: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Phases(Agents(), None, 1.5), ValueError, r"early_frac=1\.5.*\[0, 1\]"),
        (lambda: Phases(Agents(), Agents()), ValueError, "early and late are both Agents.*pass that alone"),
        (lambda: Phases(Agents(), AGENTS_THEN_KEYS), TypeError, r"late=Recipe\(.*\): pass an operator"),
        (lambda: ByDistance(POOLED, 0.5), ValueError, "thresholds=0.5: pass a list or a tuple"),
        (lambda: ByDistance((4, None), (0.5,)), TypeError, "stages=4: pass an operator"),
        (lambda: ByDistance(POOLED, (0.6, 0.3)), ValueError, "thresholds make 3: name so many"),
        (lambda: ByDistance((*POOLED, None), (0.3, 0.6)), ValueError, "pass falling shares"),
        (lambda: ByDistance((None, None), (0.5,)), ValueError, "they are all the same"),
        (lambda: PooledAgents(destinations="first"), ValueError, "and destinations are of merged tokens"),
        (lambda: Recipe("paper"), TypeError, "attention='paper': pass Phases"),
        (lambda: Recipe(), ValueError, "the recipe would do nothing"),
        (lambda: Recipe(levels=1), ValueError, "attention=None patches no level"),
        (lambda: Recipe(Phases(AgentModule(), AttnZero())), ValueError, "one trained module"),
        (lambda: Recipe(residual=ResidualSharing(), steps=StepCache()), ValueError, "attention's operators"),
    ],
)
def test_a_recipe_of_no_sense_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "quick"}, "mode='quick': choose 'agentsd' or 'fast'"),
        ({"mode": "fast", "ratio": 0.3}, "ratio=0.3: this recipe has no ratio"),
        ({"seed": -1}, r"seed=-1.*2\*\*63"),
        ({"k": 1e308}, r"k=1e\+308: pass 0 to 1000"),
        ({"k": 0.1, "early_frac": 0}, "k=0.1: early_frac=0 runs no agents"),
        (
            {"recipe": AGENTS_THEN_KEYS, "mode": "fast"},
            "^mode='fast' beside recipe=,.*pass the recipe alone",
        ),
        ({"ratio": "fast"}, "ratio='fast' is a mode: pass mode='fast'"),
        ({"recipe": "fast"}, "recipe='fast' is a mode: pass mode='fast'"),
        ({"ratio": 0.9}, "ratio=0.9: pass 0 to 0.75"),
    ],
)
def test_the_door_refuses_what_a_recipe_has_not(settings, message):
    unet = make_unet()
    with pytest.raises(ValueError, match=message):
        apply_agentsd(unet, **settings)
    assert not hasattr(unet, "_agentsd")


def test_numpy_numbers_and_integers_are_numbers(tmp_path):
    phases = Phases(Agents(ratio=np.float64(0.5), scale=0), Downsample(np.int64(2)), early_frac=1)
    recipe = Recipe(phases, seed=np.int64(3), measured={"error": np.float32(0.5), "all": [np.float64(1)]})
    read = Recipe.load(recipe.save(tmp_path))
    assert (read, read.measured, type(read.seed)) == (recipe, recipe.measured, int)


@pytest.mark.parametrize(
    "recipe",
    [
        *MODES.values(),
        Recipe(Phases(None, Merge(0.7, destinations="first"), 0.25), levels=3, seed=7),
        Recipe(ByDistance((PooledAgents(4), PooledAgents(16), None), (0.6, 0.3))),
        Recipe(Phases(FocusedLinear(convolution=False), Agents(at_most=None))),
        Recipe(Downsample(), residual=ResidualSharing(3, least_tokens=9), steps=StepCache(3, layers=2)),
    ],
)
def test_saved_and_loaded(tmp_path, recipe):
    path = recipe.save(tmp_path)
    assert path == tmp_path / "agentsd.json"
    assert Recipe.load(path) == Recipe.load(tmp_path) == Recipe.load(str(tmp_path)) == recipe


def test_a_file_holds_what_differs_and_reads_back_the_same(tmp_path):
    pooled = Phases(PooledAgents(9, ratio=0.4), Downsample())
    recipe = Recipe(pooled, levels=1, measured={"error": 0.01, "cost": "time"})
    path = recipe.save(tmp_path / "mine.json")
    assert json.loads(path.read_text()) == {
        "version": 1,
        "attention": {
            "early": {"pooled_agents": {"count": 9, "ratio": 0.4}},
            "late": {"downsample": {}},
            "early_frac": 0.4,
        },
        "levels": 1,
        "measured": {"error": 0.01, "cost": "time"},
    }
    for twin in (Recipe.load(str(path)), copy.deepcopy(recipe), pickle.loads(pickle.dumps(recipe))):
        assert (twin, hash(twin), twin.measured) == (recipe, hash(recipe), recipe.measured)
    path.write_text('{"version": 1, "attention": {"early": "agents", "late": "full"}}')  # by hand
    assert Recipe.load(path) == Recipe(Phases(Agents(), None))


def of(attention):
    return {"version": 1, "attention": attention}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"attention": ', r"mine.json is no recipe: Expecting value: line 1.*Recipe.save\(path\) writes"),
        ("[1]", "mine.json is no recipe: it holds a list"),
        ("[" * 100_000, "mine.json is no recipe"),
        (" " * 1_000_001, "it is larger than 1,000,000 bytes"),
        ({"version": 2}, "version 2 of a recipe is not read here, only 1"),
        ({"version": 1}, "mine.json: attention=None: the recipe would do nothing"),
        ({"version": 1, "ratio": 0.3}, "mine.json: 'ratio' is unknown; the settings are attention, levels"),
        ({"version": 1, "steps": 3}, "steps: 3 is no mapping of its settings, such as {interval: 2}"),
        (of({"agents": {"rato": 0.3}}), "'rato' is unknown; the settings are agent_rat"),
        (of({"agents": {}, "merge": {}}), "name one of agents, pooled_agents"),
        (of({"early": "agents", "lat": "merge"}), "'lat' is unknown; the settings are"),
        (of({"stages": 3, "thresholds": [0.5]}), "stages=3: pass a list or a tuple"),
        (of("agent"), "\\['agent'\\]: name one of agents, pooled_agents, merge"),
        (of(5), "5: name an operator"),
    ],
)
def test_a_wrong_file_is_named_with_the_way_out(tmp_path, content, message):
    path = tmp_path / "mine.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=message) as caught:
        Recipe.load(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_says_how_to_make_one(tmp_path):
    """Nothing is downloaded: a repository of the hub is by a call of its own, and then is a folder."""
    for make in (Recipe.load, lambda path: apply_agentsd(make_unet(), recipe=path)):
        with pytest.raises(FileNotFoundError, match=r"none.json: no such file; Recipe.save\(path\) wr"):
            make(tmp_path / "none.json")
    with pytest.raises(FileNotFoundError, match=r"agentsd.json: no such file"):
        Recipe.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="someone/fast: no such file"):
        apply_agentsd(make_unet(), recipe="someone/fast")


def test_only_regular_files_are_read(tmp_path):
    fifo, loop = tmp_path / "fifo.json", tmp_path / "loop.json"
    os.mkfifo(fifo)
    loop.symlink_to(loop)
    for path, message in {
        fifo: "is no recipe: it is no regular file",
        loop: "can't be read: Too many levels of symbolic links",
        tmp_path / ("x" * 300): "can't be read: File name too long",
    }.items():
        with pytest.raises(ValueError, match=message):
            Recipe.load(path)


def test_a_recipe_is_not_written_over_another_file(tmp_path):
    notes = tmp_path / "notes.json"
    notes.write_text('{"shopping": ["milk"]}')
    with pytest.raises(FileExistsError, match=r"notes\.json is no recipe and stays as it is"):
        AGENTSD.save(notes)
    assert notes.read_text() == '{"shopping": ["milk"]}'
    mine = AGENTSD.save(tmp_path)
    Recipe(PooledAgents(4)).save(mine)  # one's own recipe may change
    assert Recipe.load(mine) == Recipe(PooledAgents(4))


def test_a_setting_is_changed_in_each_stage():
    recipe = Recipe(ByDistance((Agents(), Merge()), (0.5,))).with_settings(ratio=0.3)
    assert recipe.attention == ByDistance((Agents(0.3), Merge(0.3)), (0.5,))
