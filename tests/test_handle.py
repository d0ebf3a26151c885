"""What `apply_agentsd` makes of its settings, and what its handle tells."""

import inspect
from dataclasses import replace

import pytest
import torch
from callers import Caller, ddim, equal, letters, outputs
from logs import silent, warned
from recipes import AGENTS_CACHED, STEP_CACHING
from tiny import kept, make_controlnet, make_sdxl_unet, make_unet

from agentsd import Agents, Downsample, Merge, Phases, Recipe, ResidualSharing, apply_agentsd
from agentsd.apply import _say_what_it_does
from agentsd.recipe import AGENTSD, FAST, MODES


def test_handle_tells_its_settings(pipe):
    handle = apply_agentsd(pipe, 0.3, 0.05, -0.25, 0.6)
    assert handle.recipe == AGENTSD.with_settings(ratio=0.3, k=0.05, scale=-0.25, early_frac=0.6)
    assert repr(apply_agentsd(pipe, mode="fast")) == (
        "AgentSDHandle(Recipe(attention=Downsample(stride=4, at_most=None), levels=1, "
        "steps=StepCache(warmup_steps=3, late_interval=6), "
        "residual=ResidualSharing(warmup_steps=3, least_tokens=2304, interval_from=9216)), 1 layers)"
    ).replace("1 layers", f"{len(handle.layer_names)} layers")


def test_the_default_says_once_what_it_does(pipe):
    _say_what_it_does.cache_clear()
    with warned('AgentSD changes images, as in the paper; mode="fast" keeps them'):
        apply_agentsd(pipe)
    with silent():
        apply_agentsd(pipe)
        apply_agentsd(pipe, mode="fast")


def test_settings_change_the_named_recipe_wherever_it_has_them(pipe):
    assert apply_agentsd(pipe).recipe == apply_agentsd(pipe, mode="agentsd").recipe == AGENTSD
    early, late = (
        Agents(0.2, 0.05, ranking="layer", at_most=None, agent_ratio=0.95),
        Merge(0.2, ranking="layer"),
    )
    handle = apply_agentsd(pipe, ratio=0.2, k=0.05, early_frac=0.5, seed=3)
    assert handle.recipe == Recipe(Phases(early, late, 0.5), levels=1, seed=3)


DEFAULTS = {"ratio": 0.4, "k": 0.075, "scale": -0.15, "early_frac": 0.4, "seed": 0}


def test_the_signature_shows_the_defaults():
    parameters = inspect.signature(apply_agentsd).parameters
    assert list(parameters) == ["pipe", "ratio", "k", "scale", "early_frac", "mode", "recipe", "seed"]
    shown = {name: parameters[name].default for name in [*DEFAULTS, "mode", "recipe"]}
    assert shown == DEFAULTS | {"mode": "agentsd", "recipe": None}


@pytest.mark.parametrize("mode", MODES)
def test_a_default_that_is_passed_changes_nothing(pipe, mode):
    for name, value in DEFAULTS.items():
        for source in ({"mode": mode}, {"recipe": MODES[mode]}):
            assert apply_agentsd(pipe, **source | {name: value}).recipe == MODES[mode]


def test_on_small_grids_fast_is_step_caching_alone(make_pipeline, sample):
    """16 x 16 tokens; of the same recipe that shares on every grid the latents differ."""
    made = {}
    sharing = replace(FAST, residual=replace(FAST.residual, least_tokens=0))
    for name, recipe in {"step-caching": STEP_CACHING, "fast": FAST, "sharing": sharing}.items():
        pipe = make_pipeline(scheduler=ddim())
        handle = apply_agentsd(pipe, recipe=recipe)
        assert handle.last_run == []
        made[name] = sample(pipe, num_inference_steps=12)
        assert ("attention" in handle.summary()) == (name == "sharing")
        assert [kind.computed for kind in handle.last_run] == [letter == "F" for letter in letters(handle)]
    assert [kind.attention == "share" for kind in handle.last_run] == [one == "f" for one in letters(handle)]
    assert torch.equal(made["fast"], made["step-caching"])
    assert not torch.equal(made["sharing"], made["step-caching"])


def test_a_model_of_which_no_call_can_be_left_out_is_told_the_way_out(pipe):
    before = dict(vars(pipe))
    with pytest.raises(ValueError, match=r'ControlNetModel is no U-Net.*pass mode="agentsd"'):
        apply_agentsd(make_controlnet(), mode="fast")
    assert vars(pipe) == before


def test_settings_from_a_recipe_or_its_folder(pipe, tmp_path):
    recipe = Recipe(Phases(Agents(0.2), Downsample(), early_frac=1.0))
    recipe.save(tmp_path)
    for source in (recipe, tmp_path, str(tmp_path), tmp_path / "agentsd.json"):
        assert apply_agentsd(pipe, recipe=source).recipe == recipe


@pytest.mark.parametrize("recipe", [AGENTSD, STEP_CACHING, AGENTS_CACHED])
def test_a_handle_that_is_not_enabled_leaves_the_baseline(pipe, sample, recipe):
    baseline = sample(pipe, num_inference_steps=8)
    handle = apply_agentsd(pipe, recipe=recipe)
    patched = sample(pipe, num_inference_steps=8)
    assert len(handle.last_run) == 9  # PLMS calls once more
    handle.enabled = False
    assert torch.equal(sample(pipe, num_inference_steps=8), baseline)
    assert not kept(handle)
    handle.enabled = True
    assert torch.equal(sample(pipe, num_inference_steps=8), patched)


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (MODES["agentsd"], "o" * 10),
        (Recipe(Phases(Agents(), None)), "o" * 4 + "f" * 6),
        (STEP_CACHING, "f" * 10),
        (Recipe(Downsample(32)), "f" * 10),  # no cell is whole
        (Recipe(Downsample(), residual=ResidualSharing(2, 2)), "ffsfsfsfsf"),
    ],
)
def test_what_attention_was_is_told(recipe, expected):
    handle, caller = apply_agentsd(unet := make_unet(), recipe=recipe), Caller()
    outputs(unet, caller)
    assert "".join(kind.attention[0] for kind in handle.last_run) == expected


SETTINGS = {"ratio": 0.7, "k": 0.9, "scale": -1.0, "early_frac": 1.0}


@pytest.mark.parametrize(("name", "size"), [*zip(SETTINGS, (16, 24, 16, 24), strict=True)])
def test_a_setting_acts_or_is_refused_on_every_model(name, size):
    """And on every grid: AgentSD has all four, `fast` none."""
    given = {name: SETTINGS[name]}
    for make in (make_unet, make_sdxl_unet):
        with pytest.raises(ValueError, match=rf"{name}.*leave it out"):
            apply_agentsd(unet := make(), **given, mode="fast")
        assert not hasattr(unet, "_agentsd")
        caller, made = Caller(3, size=(size, size)), []
        for settings in (given, {}):
            apply_agentsd(unet := make(), **settings)
            with silent():
                made.append(outputs(unet, caller))
        assert not equal(*made), make
