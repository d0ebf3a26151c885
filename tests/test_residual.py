"""Residual sharing: attention is full in a few steps, and an operator plus what it missed in the others."""

import copy
import functools
import gc

import pytest
import torch
from callers import NOW, RUN, Caller, Guided, Off, ddim, equal
from logs import warned
from recipes import STEP_CACHING
from tiny import kept, make_unet, may_skip, snapshot, training_sigma

from agentsd import ByDistance, Phases, Recipe, ResidualSharing, StepCache, apply_agentsd, remove_agentsd
from agentsd.attention import Agents, Downsample, Merge, PooledAgents
from agentsd.attention.matching import rank_tokens
from agentsd.modules import AgentModule

OPERATORS = {
    "agents": Agents(),
    "agents, a ranking a layer": Agents(ranking="layer", at_most=None, agent_ratio=0.95),
    "merge": Merge(),
    "downsample": Downsample(),
    "pooled agents of merged tokens": PooledAgents(9, ratio=0.4),
    "agent module": AgentModule(),
    "phases": Phases(Agents(), Downsample()),
    "agents early alone": Phases(Agents(), None),
}
STEPS = {"interval": 2, "warmup_steps": 4}


def outputs(unet, caller):
    """What the U-Net gives in each call of a run."""
    outs = []
    for i, t in enumerate(caller.timesteps):
        NOW["sigma"] = training_sigma(float(t))
        outs.append(caller(unet, i))
    return outs


def near(outs, others, **tolerances):
    return all(torch.allclose(a, b, **tolerances) for a, b in zip(outs, others, strict=True))


@functools.cache
def baseline(steps):
    """The outputs of a model without agentsd."""
    return outputs(make_unet(), Caller(steps=steps))


def patched(operator, residual, **more):
    unet = make_unet()
    return unet, apply_agentsd(unet, recipe=Recipe(operator, residual=residual, **more))


@pytest.mark.parametrize(
    ("interval", "warmup", "order", "computed", "expected"),
    [
        (2, 4, 1, "FFFFFFFFFF", "aakksksksa"),
        (2, 4, 0, "FFFFFFFFFF", "aaaksksksa"),
        (3, 1, 0, "FFFFFFF", "ksskssa"),
        (2, 4, 1, "FFFFfFfFffF", "aakksssksss"),
        (1, 4, 1, "FFFFFF", "aaaaaa"),
        (1, 2, 1, "FFFfFF", "akksaa"),
        (4, 2, 0, "FFFFF", "aksss"),
    ],
)
def test_plan(interval, warmup, order, computed, expected):
    """Residuals (k) are kept where a step shares them (s) before as many newer ones as it takes."""
    kinds = ResidualSharing(interval, warmup, order).plan([symbol == "F" for symbol in computed])
    made = "".join({"full": "a", "keep": "k", "share": "s"}[kind] for kind in kinds)
    assert made == expected


def test_an_operator_that_is_full_attention_gives_the_baseline():
    caller = Caller(steps=12)
    unet, handle = patched(Off(), ResidualSharing())
    assert equal(outputs(unet, caller), baseline(12))
    assert handle.summary().endswith("attention aaaasasasasa  (4 with a shared residual)")


@pytest.mark.parametrize("steps", [None, StepCache(**STEPS), StepCache(**STEPS, extrapolation_order=0)])
@pytest.mark.parametrize("order", [0, 1])
def test_an_error_that_stays_the_same_goes(order, steps):
    caller = Caller(steps=12)
    unet, _ = patched(Off(constant=0.3), ResidualSharing(extrapolation_order=order), steps=steps)
    twin = make_unet()
    if steps is not None:
        apply_agentsd(twin, recipe=Recipe(steps=steps))
    assert near(outputs(unet, caller), outputs(twin, caller), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("order", [0, 1])
def test_an_error_that_is_linear_in_sigma_goes_with_order_1(order):
    caller = Caller(steps=12)
    unet, _ = patched(Off(constant=0.3, slope=0.1), ResidualSharing(3, extrapolation_order=order))
    assert near(outputs(unet, caller), baseline(12), rtol=1e-3, atol=1e-3) == (order == 1)


class Twin:
    """Hooks on a U-Net without agentsd that share residuals by hand, the operator in float64."""

    def __init__(self, unet, names, letters, order, stride=2):
        self.left, self.known, self.order, self.stride = list(letters), {}, order, stride
        unet.register_forward_pre_hook(may_skip(lambda module, args: setattr(self, "now", self.left.pop(0))))
        for name in names:
            layer = unet.get_submodule(name)
            layer.register_forward_hook(
                may_skip(lambda m, args, out, name=name: self.give(name, m, args[0], out))
            )

    def approximate(self, attn, x):
        side = int(x.shape[1] ** 0.5)
        kept = [r * side + c for r in range(0, side, self.stride) for c in range(0, side, self.stride)]
        weights = {n: attn.get_submodule(n).weight.double() for n in ("to_q", "to_k", "to_v", "to_out.0")}
        x, few = x.double(), x.double()[:, kept]
        out = torch.zeros_like(x)
        width = x.shape[2] // attn.heads
        for h in range(attn.heads):
            part = slice(h * width, (h + 1) * width)
            q, k, v = (y @ weights[n][part].T for y, n in ((x, "to_q"), (few, "to_k"), (few, "to_v")))
            out[..., part] = (q @ k.transpose(1, 2) / width**0.5).softmax(-1) @ v
        return out @ weights["to_out.0"].T + attn.to_out[0].bias.double()

    def give(self, name, attn, x, full):
        made, known = self.approximate(attn, x), self.known.setdefault(name, [])
        if self.now == "a":
            known[:] = [*known, (NOW["sigma"], full.double() - made)][-2:]
            return None
        (before, start), (last, end) = known
        share = (NOW["sigma"] - before) / (last - before) if self.order else 1.0
        return (made + start + share * (end - start)).float()


@pytest.mark.parametrize("order", [0, 1])
def test_a_run_is_that_of_a_loop_by_hand(order):
    caller, (unet, handle) = Caller(steps=10), patched(Downsample(), ResidualSharing(3, 2, order))
    twin = make_unet()
    Twin(twin, handle.layer_names, "aassassass", order)
    with torch.no_grad():
        made, expected = outputs(unet, caller), outputs(twin, caller)
    assert handle.summary().split("attention ")[1].startswith("aassassass")
    assert near(made, expected, rtol=1e-4, atol=1e-5)
    plain, _ = patched(Downsample(), None)
    assert not near(outputs(plain, caller), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", OPERATORS)
def test_interval_1_is_the_baseline(name):
    unet, handle = patched(OPERATORS[name], ResidualSharing(1))
    assert equal(outputs(unet, Caller(steps=8)), baseline(8))
    assert "attention" not in handle.summary()


@functools.cache
def denoised(recipe):
    """A guided run's last latents, and its summary."""
    unet, caller = make_unet(), Guided(steps=12)
    handle = apply_agentsd(unet, recipe=recipe) if recipe else None
    scheduler, x = caller.scheduler, caller.latents[0]
    scheduler.set_timesteps(12)
    with torch.no_grad():
        for t in scheduler.timesteps:
            without, with_text = unet(x, t, caller.text).sample.chunk(2)
            out = without + 3 * (with_text - without)
            x = torch.cat([scheduler.step(out, t, x[:1]).prev_sample] * 2)
    return x, handle and handle.summary()


@pytest.mark.parametrize(
    ("name", "steps"), [*((name, StepCache(**STEPS)) for name in OPERATORS), ("agents", None)]
)
def test_sharing_brings_a_run_back_to_full_attention(name, steps):
    """Beside the same caching."""
    apart = {}
    expected, _ = denoised(steps and Recipe(steps=steps))
    for residual in (None, ResidualSharing()):
        made, summary = denoised(Recipe(OPERATORS[name], residual=residual, steps=steps))
        apart[residual] = (made - expected).norm()
    assert apart[ResidualSharing()] < 0.2 * apart[None]
    assert "s" in summary.split("attention ")[1].split()[0]


@pytest.mark.parametrize("operator", [Agents(), Merge(), Agents(ranking="layer")])
def test_tokens_are_matched_once_a_run(operator, monkeypatch):
    ranked = []

    def count(metric, drawn):
        ranked.append(metric.shape)
        return rank_tokens(metric, drawn)

    monkeypatch.setattr("agentsd.attention.ranking.rank_tokens", count)
    unet, handle = patched(operator, ResidualSharing())
    caller = Caller(steps=12)
    for _ in range(2):
        outputs(unet, caller)
    groups = len(handle._layers.groups)
    assert len(ranked) == 2 * groups
    assert not any(group.plan for group in handle._layers.groups)


def test_a_stage_of_another_operator_begins_with_full_attention():
    caller = Caller(steps=20)
    unet, handle = patched(Phases(Agents(), Downsample(), 0.5), ResidualSharing(3, 2))
    outputs(unet, caller)
    letters = handle.summary().split("attention ")[1].split()[0]
    assert letters[10] == "a"
    assert letters.count("a") < 10
    unet, handle = patched(ByDistance((PooledAgents(4), PooledAgents(9)), (0.9,)), ResidualSharing(3, 2))
    outputs(unet, caller)
    assert "s" in handle.summary().split("attention ")[1].split()[0]


def test_small_grids_keep_full_attention():
    caller = Caller(steps=8)
    for least, shared in ((256, True), (257, False)):
        unet, _ = patched(Downsample(), ResidualSharing(least_tokens=least))
        assert equal(outputs(unet, caller), baseline(8)) != shared


def test_computed_steps_share_from_a_size_on():
    """16 x 16 tokens: as at interval 1 where it begins above them, and else as at the interval."""
    made = {}
    for name, residual in {
        "above": ResidualSharing(2, 3, interval_from=257),
        "cached alone": ResidualSharing(1, 3),
        "from here": ResidualSharing(2, 3, interval_from=256),
        "everywhere": ResidualSharing(2, 3),
    }.items():
        unet, handle = patched(Downsample(), residual, steps=StepCache(**STEPS))
        made[name] = outputs(unet, Caller(steps=12)), handle.summary()
    for one, other in (("above", "cached alone"), ("from here", "everywhere")):
        assert made[one][1] == made[other][1]
        assert equal(made[one][0], made[other][0])
    assert made["above"][1] != made["everywhere"][1]


@pytest.mark.parametrize("broken", ["step", "run"])
def test_nothing_is_left_of_a_run(broken):
    recipe = Recipe(Agents(), residual=ResidualSharing(), steps=StepCache(**STEPS))
    unet, twin, caller, other = make_unet(), make_unet(), Caller(steps=12), Caller(steps=12, seed=3)
    host = caller.pipe(unet)
    handle = apply_agentsd(host, recipe=recipe)
    apply_agentsd(other.pipe(twin), recipe=recipe)
    before = snapshot(unet)
    expected = outputs(twin, other)
    for i in range(7):
        caller(unet, i)
    if broken == "step":
        hook = unet.conv_out.register_forward_pre_hook(may_skip(lambda *args: 1 / 0))
        with pytest.raises(ZeroDivisionError):
            caller(unet, 7)
        hook.remove()
    host.scheduler, caller = other.scheduler, None  # a run is over when its scheduler is
    assert equal(outputs(unet, other), expected)
    assert not kept(handle)
    assert snapshot(unet) == before
    tensors = sum(type(x) is torch.Tensor for x in gc.get_objects())
    outputs(unet, other)
    assert sum(type(x) is torch.Tensor for x in gc.get_objects()) <= tensors
    remove_agentsd(unet)
    assert equal(outputs(unet, other), outputs(make_unet(), other))


def test_gradients_and_short_runs_have_full_attention():
    unet, _ = patched(Downsample(), ResidualSharing())
    caller = Caller(steps=8)
    with warned("gradients are on"):
        out = unet(caller.latents[0], caller.timesteps[0], caller.text).sample
    assert torch.equal(out.detach(), make_unet()(caller.latents[0], caller.timesteps[0], caller.text).sample)
    short = Caller(steps=4)
    with warned("a run of 4 steps has none to spare"):
        assert equal(outputs(unet, short), outputs(make_unet(), short))


def test_a_copy_and_a_file(tmp_path, make_pipeline, sample):
    recipe = Recipe(
        Phases(Agents(), Downsample(4)), residual=ResidualSharing(3, least_tokens=9), steps=STEP_CACHING.steps
    )
    assert Recipe.load(recipe.save(tmp_path)) == recipe
    assert '"residual"' in (tmp_path / "agentsd.json").read_text()
    pipe = make_pipeline(scheduler=ddim())
    apply_agentsd(pipe, recipe=recipe)
    image = sample(pipe, **RUN)  # a word would be an error
    assert torch.equal(sample(copy.deepcopy(pipe), **RUN), image)


def test_what_is_trained_shares_nothing():
    handle = apply_agentsd(make_unet(), recipe=Recipe(AgentModule(), residual=ResidualSharing()))
    with pytest.raises(ValueError, match=r"residual=.*train the recipe without it"):
        handle.parameters()
