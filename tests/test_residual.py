"""Residual sharing: attention is full in a few steps, and an operator plus what it missed in the others."""

import functools

import pytest
import torch
from callers import Caller, Host, Off, attention_by_hand, ddim, equal, outputs, sampled
from tiny import make_sdxl_unet, make_small_unet, training_sigma

from agentsd import ByDistance, Phases, Recipe, ResidualSharing, StepCache, apply_agentsd
from agentsd.attention import Agents, Downsample, Merge, PooledAgents
from agentsd.attention.agents import AgentsPlan
from agentsd.attention.downsample import DownsamplePlan
from agentsd.modules import AgentModule

CACHING = StepCache(2, warmup_steps=4)


def patched(operator, residual, **more):
    unet = make_small_unet()
    return unet, apply_agentsd(unet, recipe=Recipe(operator, residual=residual, **more))


def run(operator, residual, calls=12, **more):
    """A run's outputs, and the letters of its calls' attention."""
    unet, handle = patched(operator, residual, **more)
    return outputs(unet, Caller(calls)), handle.summary().partition("attention ")[2].partition(" ")[0]


@pytest.mark.parametrize(
    ("interval", "warmup", "order", "computed", "expected"),
    [
        (2, 4, 1, "FFFFFFFFFF", "aakksksksa"),
        (2, 4, 0, "FFFFFFFFFF", "aaaksksksa"),
        (3, 1, 0, "FFFFFFF", "ksskssa"),
        (2, 4, 1, "FFFFfFfFffF", "aakksssksss"),
        (1, 2, 1, "FFFfFF", "akksaa"),
    ],
)
def test_plan(interval, warmup, order, computed, expected):
    """Residuals (k) are kept where a step shares them (s) before as many newer ones as it takes."""
    kinds = ResidualSharing(interval, warmup, order).plan([symbol == "F" for symbol in computed])
    assert "".join({"full": "a", "keep": "k", "share": "s"}[kind] for kind in kinds) == expected


def test_an_operator_that_is_full_attention_gives_the_baseline():
    outs, letters = run(Off(), ResidualSharing())
    assert equal(outs, outputs(make_small_unet(), Caller(12)))
    assert letters == "aaaasasasasa"


class Twin:
    """Hooks on a U-Net without agentsd that share residuals by hand, the operator in float64."""

    def __init__(self, unet, names, letters, order):
        self.left, self.known, self.order = list(letters), {}, order
        unet.register_forward_pre_hook(self.begin)
        for name in names:
            layer = unet.get_submodule(name)
            layer.register_forward_hook(lambda m, args, out, name=name: self.give(name, m, args[0], out))

    def begin(self, module, args):
        self.now, self.sigma = self.left.pop(0), training_sigma(float(args[1]))

    def give(self, name, attn, x, full):
        side, known = int(x.shape[1] ** 0.5), self.known.setdefault(name, [])
        kept = [r * side + c for r in range(0, side, 2) for c in range(0, side, 2)]
        made = attention_by_hand(attn, x, x[:, kept])
        if self.now == "a":
            known[:] = [*known, (self.sigma, full.double() - made)][-2:]
            return None
        (before, start), (last, end) = known
        share = (self.sigma - before) / (last - before) if self.order else 1.0
        return (made + start + share * (end - start)).float()


@pytest.mark.parametrize("order", [0, 1])
def test_a_run_is_that_of_a_loop_by_hand(order):
    unet, handle = patched(Downsample(), ResidualSharing(3, 2, order))
    twin, caller = make_small_unet(), Caller(steps=10)
    Twin(twin, handle.layer_names, "aassassass", order)
    made, expected = outputs(unet, caller), outputs(twin, caller)
    assert handle.summary().split("attention ")[1].startswith("aassassass")
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-5)


@functools.cache
def denoised(recipe):
    """A guided run's last latents, and its summary."""
    host = Host(make_small_unet(), ddim(12))
    handle = recipe and apply_agentsd(host, recipe=recipe)
    return sampled(host.unet, host.scheduler), handle and handle.summary()


PHASES = Phases(Agents(), Downsample())


@pytest.mark.parametrize(
    ("operator", "steps"),
    [
        (Merge(ranking="layer"), CACHING),
        (PooledAgents(9, ratio=0.4), CACHING),
        (AgentModule(), CACHING),
        (PHASES, CACHING),
        (PHASES, None),
    ],
)
def test_sharing_brings_a_run_back_to_full_attention(operator, steps):
    expected, _ = denoised(steps and Recipe(steps=steps))
    (apart, _), (shared, summary) = (
        denoised(Recipe(operator, residual=residual, steps=steps)) for residual in (None, ResidualSharing())
    )
    assert (shared - expected).norm() < 0.2 * (apart - expected).norm()
    assert "s" in summary.split("attention ")[1].split()[0]


@pytest.mark.parametrize(
    ("operator", "residual", "expected"),
    [
        (Phases(Agents(), Downsample(), 0.5), ResidualSharing(3, 2), "aassasaassas"),
        (Phases(Agents(), Downsample(), 0.5), ResidualSharing(9, 2), "aassssasssas"),
        (ByDistance((PooledAgents(4), PooledAgents(9)), (0.9,)), ResidualSharing(3, 2), "aassassassas"),
    ],
)
def test_a_stage_of_another_operator_begins_with_full_attention(operator, residual, expected):
    assert run(operator, residual)[1] == expected


def test_the_last_cached_step_of_a_phase_is_corrected_beside_the_next_ones_residuals():
    """Each operator's error stays the same, so the run is that of cached steps alone."""
    steps, phases = StepCache(2), Phases(Off(constant=0.3), Off(constant=-0.5), 0.5)
    expected, _ = denoised(Recipe(steps=steps))
    made, summary = denoised(Recipe(phases, residual=ResidualSharing(2, 2), steps=steps))
    assert summary.startswith("FfFfFfFfFfFf  (12 calls: 6 full; 6 cached; 5 corrected)")
    assert (made - expected).norm() < 1e-4 * expected.norm()


def test_computed_steps_share_from_a_size_on():
    """16 x 16 tokens: as at interval 1 where it begins above them, and else as at the interval."""
    above, alone, here, everywhere = (
        run(Downsample(), residual, steps=CACHING)
        for residual in (
            ResidualSharing(2, 3, interval_from=257),
            ResidualSharing(1, 3),
            ResidualSharing(2, 3, interval_from=256),
            ResidualSharing(2, 3),
        )
    )
    for (outs, letters), (others, expected) in ((above, alone), (here, everywhere)):
        assert letters == expected
        assert equal(outs, others)
    assert above[1] != everywhere[1]


def test_what_is_trained_shares_nothing():
    handle = apply_agentsd(make_small_unet(), recipe=Recipe(AgentModule(), residual=ResidualSharing()))
    with pytest.raises(ValueError, match=r"residual=.*train the recipe without it"):
        handle.parameters()


@pytest.fixture
def attended(monkeypatch):
    """The layers that an operator was run in."""
    seen = set()
    for plan in (DownsamplePlan, AgentsPlan):
        attend = plan.attend

        def note(self, attn, *args, attend=attend):
            seen.add(attn.processor.layer.name)
            return attend(self, attn, *args)

        monkeypatch.setattr(plan, "attend", note)
    return seen


@pytest.mark.parametrize("operator", [Downsample(), Phases(Agents(stride=2), Downsample())])
def test_layers_that_cached_steps_skip_run_no_operator(operator, attended):
    """At interval 1; where full steps share, all layers do."""
    caller, caching = Caller(steps=12), make_small_unet()
    unet, handle = patched(operator, ResidualSharing(1), steps=CACHING)
    apply_agentsd(caching, recipe=Recipe(steps=CACHING))
    made, others = outputs(unet, caller), outputs(caching, caller)
    assert attended == {"up_blocks.1.attentions.1.transformer_blocks.0.attn1"} < set(handle.layer_names)
    assert equal(made[:4], others[:4])
    assert not torch.equal(made[4], others[4])  # the first cached
    run(operator, ResidualSharing(2), steps=CACHING)
    assert attended == set(handle.layer_names)


def test_a_last_block_without_attention_leaves_step_caching_alone(attended):
    made = []
    for more in ({}, {"attention": Downsample(), "residual": ResidualSharing(1)}):
        handle = apply_agentsd(unet := make_sdxl_unet(), recipe=Recipe(**more, steps=CACHING))
        made.append((outputs(unet, Caller(steps=12)), handle.summary()))
    assert equal(made[0][0], made[1][0])
    assert made[0][1] == made[1][1]
    assert not attended
