"""A run's seconds from its calls."""

from collections import Counter

import pytest
import torch
from agentsd_eval.cost import architectures
from agentsd_eval.cost.latency import Case, load
from agentsd_eval.errors import EvalError
from agentsd_eval.images.methods import parse_method
from agentsd_eval.images.sampling import Seconds
from agentsd_eval.research import priced
from agentsd_eval.research.priced import Kind, calls_of, on_grid, recipe_of
from agentsd_eval.research.settings import PricedSettings
from callers import Host
from diffusers import DPMSolverMultistepScheduler
from recipes import AGENTS_CACHED, STEP_CACHING
from tiny import make_scheduler, make_unet

from agentsd import apply_agentsd
from agentsd.recipe import AGENTSD

SHARED = {"attention": {"downsample": {"stride": 2}}, "residual": {"interval": 3}}
BOTH = SHARED | {"residual": {"interval": 2}, "steps": {"interval": 2}}  # computed and cached steps share
TIMESTEPS = [float(t) for t in range(975, -25, -40)]


def test_a_run_of_step_caching_has_as_many_calls_of_each_kind_as_a_real_one():
    unet, scheduler = make_unet(), make_scheduler()
    scheduler = DPMSolverMultistepScheduler.from_config(scheduler.config)
    scheduler.set_timesteps(25)
    text, latent = torch.zeros(2, 7, 16), torch.randn(2, 4, 16, 16)
    host = Host(unet, scheduler)
    with torch.no_grad(), apply_agentsd(host, recipe=STEP_CACHING) as handle:
        for t in scheduler.timesteps:
            unet(latent, t, encoder_hidden_states=text)
        symbols, _, told = handle.summary().partition(" ")
    assert " corrected" in told
    counts = calls_of(STEP_CACHING, scheduler.timesteps.tolist())
    assert counts[Kind()] == symbols.count("F")
    assert counts[Kind(full=False)] == symbols.count("f") + symbols.count("fF")


def test_the_default_shares_in_cached_steps_alone_and_not_on_small_grids():
    kinds = calls_of(on_grid(AGENTS_CACHED, 4096), TIMESTEPS)
    assert {kind.attention for kind in kinds if not kind.full} == {"share"}
    assert sum(n for kind, n in kinds.items() if kind.full) == 10
    assert {kind.stage for kind in kinds if not kind.full} == {True, False}
    large = calls_of(on_grid(AGENTS_CACHED, 9216), TIMESTEPS)
    assert sum(n for kind, n in large.items() if kind.full and kind.attention == "share") == 4
    assert calls_of(on_grid(AGENTS_CACHED, 1024), TIMESTEPS) == calls_of(STEP_CACHING, TIMESTEPS)


def test_the_papers_run_is_early_and_late_calls():
    assert calls_of(AGENTSD, TIMESTEPS) == Counter({Kind(True): 10, Kind(False): 15})
    assert calls_of(None, TIMESTEPS) == Counter({Kind(): 25})


def test_every_kind_of_a_run_has_a_price(monkeypatch):
    """Where everything takes a second, a run takes one for each call and correction, and one to decode."""
    tiny = {"block_out_channels": (32, 64), "cross_attention_dim": 32, "sample_size": 16}
    tiny["down_block_types"] = ("CrossAttnDownBlock2D", "DownBlock2D")
    tiny["up_block_types"] = ("UpBlock2D", "CrossAttnUpBlock2D")
    monkeypatch.setattr(architectures, "SD15", tiny)

    def a_second(watch, *error):
        watch.seconds = Seconds(1, 1)

    monkeypatch.setattr(priced.Stopwatch, "__exit__", a_second)
    named = {"shared": {"recipe": SHARED}, "both": {"recipe": BOTH}}
    settings = PricedSettings(steps=25, scheduler="dpm++karras", arch="sd15", named=named)
    pipe = load(settings)
    names = ["baseline", "baseline@12", "agentsd", "deepcache-3", "fast", "shared", "both"]
    methods = [parse_method(name, 0.4, settings) for name in names]
    seconds = priced.priced(pipe, methods, Case("priced", 64, 1), settings)
    calls = sum(calls_of(STEP_CACHING, TIMESTEPS).values())
    assert [one.cpu for one in seconds] == [26, 13, 26, 26, calls + 1, 26, 25 + 12 + 1]


def test_what_is_not_priced_is_refused():
    message = r"tomesd r=0\.4: a run is priced for the baseline, DeepCache and recipes"
    with pytest.raises(EvalError, match=message):
        recipe_of(parse_method("tomesd", 0.4, PricedSettings()))
