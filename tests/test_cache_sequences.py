"""Random sequences of runs on one U-Net: each gives what it gives on a fresh one."""

import copy
import functools
import threading
import warnings

import pytest
import torch
from callers import Host, equal, plant, whole
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recipes import STEP_CACHING
from sampling import SAMPLERS
from tiny import make_unet

from agentsd import Phases, Recipe, ResidualSharing, StepCache, apply_agentsd, remove_agentsd
from agentsd.attention import Agents, Downsample

AGENTS = Agents(stride=2)
RECIPES = {
    "baseline": None,
    "step-caching": STEP_CACHING,
    "steps": Recipe(steps=StepCache(2, late_interval=4)),
    "two layers": Recipe(steps=StepCache(3, extrapolation_order=0, layers=2)),
    "intervals": Recipe(steps=StepCache(3, warmup_steps=2, late_interval=5)),
    "residual": Recipe(AGENTS, residual=ResidualSharing(2, 2)),
    "all": Recipe(
        Phases(AGENTS, Downsample()), residual=ResidualSharing(2, 3), steps=StepCache(2, warmup_steps=3)
    ),
    "attention": Recipe(Phases(None, Downsample()), steps=StepCache(2)),
}
RUNS = st.tuples(
    st.sampled_from(list(RECIPES)),
    st.sampled_from(["DDIM", "PLMS", "Heun", "DPM++ 2M", "Euler a"]),
    st.sampled_from([0, 2]),  # steps that are left out before eight, as img2img does
    st.sampled_from([(4, 4), (6, 4)]),
    st.sampled_from([1, 2]),  # images
    st.sampled_from([True, True, False]),  # guided
    st.sampled_from([0, 1]),  # prompt
    st.sampled_from(["whole", "whole", "break", "error", "interrupt", "cut", "prompt", "reapply"]),
    st.sampled_from([1, 3, 4]),  # calls before that
)


@functools.cache
def base():
    return make_unet(
        block_out_channels=(4, 8),
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        mid_block_type=None,
        cross_attention_dim=4,
        attention_head_dim=1,
        norm_num_groups=2,
    )


class Stop(Exception):
    """In the middle of a call."""


class Denoising:
    """A pipeline's loop on a U-Net, with something that happens after some of its calls."""

    def __init__(self, host, spec):
        _, sampler, skipped, size, images, self.guided, prompt, self.happens, self.after = spec
        self.host, self.unet = host, host.unet
        self.scheduler = host.scheduler = SAMPLERS[sampler].make()
        self.scheduler.set_timesteps(8 + skipped)
        begin = skipped * getattr(self.scheduler, "order", 1)
        if hasattr(self.scheduler, "set_begin_index"):
            self.scheduler.set_begin_index(begin)
        self.timesteps = self.scheduler.timesteps[begin:]
        self.rng = torch.Generator().manual_seed(prompt)
        self.latent = torch.randn(images, 4, *size, generator=self.rng)
        self.text = torch.randn(images * (1 + self.guided), 3, 4, generator=self.rng)
        self.outs = []

    def run(self):
        """What the U-Net gives in each call."""
        try:
            for t in self.timesteps:
                if len(self.outs) == self.after:
                    self.happen()
                self.step(t)
        except (Stop, KeyboardInterrupt):
            pass
        return self.outs

    def happen(self):
        if self.happens == "break":
            raise Stop
        if self.happens in ("error", "interrupt"):
            plant(self.unet, "up_blocks.1.resnets.1", Stop if self.happens == "error" else KeyboardInterrupt)
        if self.happens == "cut" and self.guided:
            self.guided, self.text = False, self.text.chunk(2)[1].clone()
        if self.happens == "prompt":
            self.text = self.text.flip(0)
        if self.happens == "reapply" and hasattr(self.unet, "_agentsd"):
            apply_agentsd(self.host, recipe=self.unet._agentsd.recipe)

    def step(self, t):
        x = self.scheduler.scale_model_input(self.latent, t)
        with torch.no_grad():
            out = self.unet(torch.cat([x] * 2) if self.guided else x, t, self.text).sample
        self.outs.append(out)
        if self.guided:
            first, second = out.chunk(2)
            out = first + 3.0 * (second - first)
        more = {"generator": self.rng} if "Ancestral" in type(self.scheduler).__name__ else {}
        self.latent = self.scheduler.step(out, t, self.latent, **more).prev_sample


def patch(host, name):
    remove_agentsd(host)
    if RECIPES[name] is not None:
        apply_agentsd(host, recipe=RECIPES[name])


@functools.cache
def expected(spec):
    host = Host(copy.deepcopy(base()))
    patch(host, spec[0])
    return Denoising(host, spec).run()


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # a word of torch's on its own flags
@settings(max_examples=20, deadline=None, database=None, derandomize=True, suppress_health_check=HealthCheck)
@given(st.lists(RUNS, min_size=2, max_size=3), st.booleans())
def test_a_run_gives_what_it_gives_on_a_fresh_model(specs, in_threads):
    host, before = Host(copy.deepcopy(base())), None
    with warnings.catch_warnings(), torch.backends.mkldnn.flags(enabled=False):  # slower on so small a model
        warnings.simplefilter("ignore")
        for spec in specs:
            if spec[0] != before:
                patch(host, before := spec[0])
            work = Denoising(host, spec)
            if in_threads:
                thread = threading.Thread(target=work.run)
                thread.start()
                thread.join()
            else:
                work.run()
            assert equal(work.outs, expected(spec))
    remove_agentsd(host)
    assert whole(host.unet)
