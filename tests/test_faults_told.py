"""Faults that were found and mended: what is told of a run, its noise levels, settings without effect."""

from itertools import pairwise

import diffusers
import pytest
import torch
from callers import Caller, Host, inputs
from logs import silent
from recipes import STEP_CACHING
from tiny import BETAS, make_sdxl_unet, make_unet

from agentsd import Agents, Downsample, Merge, Phases, Recipe, ResidualSharing, apply_agentsd
from agentsd.recipe import MODES
from agentsd.sampler import Sampler


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
    for i in range(10):
        caller(unet, i)
    assert "".join(kind.attention[0] for kind in handle.last_run) == expected


LEVELS = {
    "linear": {"beta_start": 0.0001, "beta_end": 0.02, "beta_schedule": "linear"},
    "scaled": BETAS,
    "cosine": {"beta_schedule": "squaredcos_cap_v2"},
}


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("name", LEVELS)
def test_noise_levels_are_the_schedulers_own(name, last):
    """The oracle is the scheduler's own step: with the output 0 its latent shrinks by the ratio of alphas."""
    scheduler = diffusers.DDIMScheduler(
        **LEVELS[name], clip_sample=False, set_alpha_to_one=last, steps_offset=1, prediction_type="epsilon"
    )
    scheduler.set_timesteps(12)
    sigmas = Sampler(scheduler, scheduler.timesteps.tolist()).sigmas
    for t, (sigma, following) in zip(scheduler.timesteps, pairwise(sigmas), strict=False):
        one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
        # epsilon moves y by sigma' - sigma, and y is x sqrt(1 + sigma**2)
        before, after = (1 + sigma**2) ** 0.5, (1 + following**2) ** 0.5
        moved = float(scheduler.step(one, t, 0 * one).prev_sample)
        assert moved * after == pytest.approx(following - sigma, rel=1e-3)
        grown = float(scheduler.step(0 * one, t, one).prev_sample)
        assert grown * after == pytest.approx(before, rel=1e-3)


KARRAS = {
    "DPM++": lambda: diffusers.DPMSolverMultistepScheduler(**BETAS, use_karras_sigmas=True),
    "UniPC": lambda: diffusers.UniPCMultistepScheduler(**BETAS, use_karras_sigmas=True),
}


@pytest.mark.parametrize("steps", [45, 50, 100])
@pytest.mark.parametrize("name", KARRAS)
def test_rounded_timesteps_that_repeat_are_steps_of_their_own(name, steps):
    """Each is planned, and corrected, by its own noise level."""
    scheduler = KARRAS[name]()
    scheduler.set_timesteps(steps)
    assert len(set(scheduler.timesteps.tolist())) < steps
    host = Host(unet := make_unet(), scheduler)
    handle = apply_agentsd(host, recipe=STEP_CACHING)
    latent, text = inputs()
    with silent(), torch.no_grad():
        for t in scheduler.timesteps:
            latent = scheduler.step(unet(latent, t, text).sample, t, latent).prev_sample
    letters = "".join(kind.letter for kind in handle.last_run)
    # four computed steps; then one in two, and of the second half one in three
    assert letters == "".join("F" if full else "f" for full in STEP_CACHING.steps.computed(steps))
    cached = letters.rstrip("f").count("f")
    assert f"{cached} corrected" in handle.summary()


def test_each_phase_ranks_as_it_says(monkeypatch):
    """Agents rank once a level, merged tokens in each of the layers, whichever stands beside the other."""
    from agentsd.attention import ranking

    ranked, rank = [], ranking.rank_tokens
    monkeypatch.setattr(ranking, "rank_tokens", lambda *args: ranked.append(1) or rank(*args))
    counts = {}
    for name, recipe in {
        "level, level": Phases(Agents(), Merge()),
        "layer, layer": Phases(Agents(ranking="layer"), Merge(ranking="layer")),
        "level, layer": Phases(Agents(), Merge(ranking="layer")),
        "layer, level": Phases(Agents(ranking="layer"), Merge()),
    }.items():
        apply_agentsd(unet := make_unet(), recipe=Recipe(recipe))
        caller, counts[name] = Caller(), []
        for i in (0, 9):
            ranked.clear()
            caller(unet, i)
            counts[name].append(len(ranked))
    (few, some), (many, most) = counts["level, level"], counts["layer, layer"]
    assert few == some == 2  # levels
    assert many == most == 6  # layers
    assert counts["level, layer"] == [2, 6]
    assert counts["layer, level"] == [6, 2]


def test_a_stage_is_the_same_whatever_ranks_in_the_other():
    outputs = []
    for late in (Merge(), Merge(ranking="layer")):
        apply_agentsd(unet := make_unet(), recipe=Recipe(Phases(Agents(), late)))
        outputs.append(Caller()(unet, 0))
    assert torch.equal(*outputs)


SETTINGS = {"ratio": 0.7, "k": 0.9, "scale": -1.0, "early_frac": 1.0}


@pytest.mark.parametrize("size", [16, 48])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_acts_or_is_refused_on_every_model(name, size):
    """And on every grid: AgentSD has all four, `fast` none."""
    given = {name: SETTINGS[name]}
    for make in (make_unet, make_sdxl_unet):
        with pytest.raises(ValueError, match=rf"{name}.*leave it out"):
            apply_agentsd(unet := make(), **given, mode="fast")
        assert not hasattr(unet, "_agentsd")
        caller, made = Caller(12, size=(size, size)), []
        for settings in (given, {}):
            apply_agentsd(unet := make(), **settings)
            with silent():
                made.append([caller(unet, i) for i in range(12)])
        assert not all(map(torch.equal, *made)), make
