"""Methods: parsed by name, applied, and every trace of them removed."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from agentsd_eval.errors import EvalError
from agentsd_eval.images.methods import Method, check_schedulers, expand, fewer, parse_method
from agentsd_eval.images.models import scheduler_like
from agentsd_eval.images.other_packages import finest_attention_downsample
from agentsd_eval.images.prompts import from_prompts
from agentsd_eval.images.sampling import sample as images_of_method
from agentsd_eval.names import METHODS, SAMPLERS, is_method
from agentsd_eval.names import MODES as MODE_NAMES
from agentsd_eval.settings import CompareSettings, RunSettings
from diffusers import DDIMScheduler, HeunDiscreteScheduler, PNDMScheduler, UniPCMultistepScheduler
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from tiny import BETAS, fingerprint, make_sdxl_unet, make_unet

from agentsd import Downsample, Phases, PooledAgents, Recipe, StepCache, apply_agentsd
from agentsd.modules import AgentModule, FocusedLinear
from agentsd.recipe import AGENTSD, MODES

SETTINGS = CompareSettings()
EVERY = (
    "baseline",
    "tomesd",
    "agentsd",
    "todo",
    "deepcache",
    "spectrum",
    "easycache-60",
    "agentsd+deepcache",
    "tomesd+deepcache",
    "no-attention",
    "no-attention-all",
)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("backend", ["sdpa", "unfused"])
def test_methods_act_and_leave_no_trace(pipe: Any, sample: Any, name: str, backend: Any) -> None:
    baseline = sample(pipe)
    before = fingerprint(pipe.unet)
    processors = pipe.unet.attn_processors
    with parse_method(name, 0.5, CompareSettings(backend=backend)).applied(pipe):
        inside = sample(pipe)
    assert torch.equal(inside, baseline) == (name == "baseline" and backend == "sdpa")
    assert fingerprint(pipe.unet) == before
    assert all(pipe.unet.attn_processors[key] is processor for key, processor in processors.items())
    assert torch.equal(sample(pipe), baseline)


def test_methods_are_removed_after_an_error(pipe: Any) -> None:
    before = fingerprint(pipe.unet)
    with pytest.raises(KeyError), parse_method("agentsd+deepcache", 0.5, SETTINGS).applied(pipe):
        raise KeyError
    assert fingerprint(pipe.unet) == before


def test_a_mode_can_stand_in_the_name(pipe: Any) -> None:
    with parse_method("agentsd+deepcache", 0.5, SETTINGS).applied(pipe):
        assert pipe.unet._agentsd.recipe == AGENTSD.with_settings(ratio=0.5)
    assert re.fullmatch("agentsd-r0.5-[0-9a-f]{8}-sdpa", parse_method("agentsd", 0.5, SETTINGS).key)


def test_every_mode_is_a_methods_name() -> None:
    """Names are read before torch is loaded, which the modes themselves load."""
    assert set(MODE_NAMES) == set(MODES)
    assert all(map(is_method, (*MODES, *METHODS)))


def test_images_of_a_modes_other_recipe_are_not_taken_for_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under an earlier version's key they would be found again, and stand in the new one's row."""
    before = [
        parse_method(name, 0.4, SETTINGS).key for name in ("fast", "fast@9", "fast+deepcache", "tomesd")
    ]
    monkeypatch.setitem(MODES, "fast", Recipe(steps=StepCache(3)))
    after = [parse_method(name, 0.4, SETTINGS).key for name in ("fast", "fast@9", "fast+deepcache", "tomesd")]
    assert [one != other for one, other in zip(before, after, strict=True)] == [True, True, True, False]


@pytest.mark.parametrize(("backend", "kind"), [("sdpa", AttnProcessor2_0), ("unfused", AttnProcessor)])
def test_backend_sets_every_standard_layer(backend: Any, kind: type) -> None:
    unet = make_unet()
    with Method((), backend=backend).applied(unet):
        assert {type(processor) for processor in unet.attn_processors.values()} == {kind}


def test_reseeded_tomesd_repeats_its_images(pipe: Any, sample: Any) -> None:
    method = parse_method("tomesd", 0.5, SETTINGS)

    def run(seed: int) -> torch.Tensor:
        torch.rand(3)  # whatever else draws from the global generator
        with method.applied(pipe, seed):
            return sample(pipe)

    assert torch.equal(run(0), run(0))
    assert not torch.equal(run(0), run(1))


def test_tomesd_is_no_silent_no_op_on_sdxl() -> None:
    unet = make_sdxl_unet()
    assert (finest_attention_downsample(make_unet()), finest_attention_downsample(unet)) == (1, 2)
    inputs = torch.randn(2, 4, 16, 16), torch.tensor(500), torch.randn(2, 5, 16)
    with torch.no_grad():
        baseline = unet(*inputs).sample
        with parse_method("tomesd", 0.5, SETTINGS).applied(unet):
            assert not torch.equal(unet(*inputs).sample, baseline)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "tome",
            "unknown method 'tome' in 'tome'; did you mean tomesd.? use baseline, tomesd, todo, .*agentsd",
        ),
        ("agentsd+baseline", "unknown method 'baseline'"),
        ("agentsd+tomesd", "name one method, and deepcache beside it"),
        ("agentsd+fast", "name one method, and deepcache beside it"),
        ("deepcache+deepcache-5", "name one method, and deepcache beside it"),
        ("fast+spectrum", "name one method, and deepcache beside it"),
        ("agentsd-fats", "unknown method 'agentsd-fats' in 'agentsd-fats'; did you mean agentsd"),
        ("deepcache-0", "unknown method 'deepcache-0'"),
        ("baseline@0", "after the @ stands a number of steps, as in baseline@20"),
        ("baseline@1001", "after the @ stands a number of steps"),
        ("baseline@many", "after the @ stands a number of steps"),
    ],
)
def test_unknown_methods_are_named(name: str, message: str) -> None:
    with pytest.raises(EvalError, match=message):
        parse_method(name, 0.4, SETTINGS)


def test_rows_of_a_table() -> None:
    methods = expand(["agentsd", "deepcache"], [0.2, 0.4], SETTINGS)
    assert [m.label for m in methods] == ["baseline", "agentsd r=0.2", "agentsd r=0.4", "deepcache"]
    assert len({m.key for m in methods}) == 4


def test_deepcache_is_refused_where_it_would_mistake_its_step() -> None:
    three, two = (parse_method(name, None, SETTINGS) for name in ("deepcache", "deepcache-2"))
    assert (three.interval, two.interval) == (3, 2)
    plms = PNDMScheduler(**BETAS, skip_prk_steps=True)
    check_schedulers([three], plms, 20)  # the one repeated timestep falls where the cache is used anyway
    check_schedulers([two], DDIMScheduler(**BETAS), 20)
    check_schedulers([Method(("agentsd",), 0.5)], HeunDiscreteScheduler(**BETAS), 20)
    with pytest.raises(EvalError, match=r"DeepCache mistakes call .* use --scheduler ddim"):
        check_schedulers([three], HeunDiscreteScheduler(**BETAS), 20)


def test_methods_by_a_name_of_ones_own(pipe: Any, sample: Any, tmp_path: Any) -> None:
    with apply_agentsd(pipe, recipe=Recipe(FocusedLinear())) as handle:
        handle.save(tmp_path / "focused")
        expected = sample(pipe)
    settings = CompareSettings(
        named={
            "few": {"recipe": {"attention": {"pooled_agents": {"count": 4}}}},
            "mine": tmp_path / "focused",
        }
    )
    few, mine = parse_method("few", 0.5, settings), parse_method("mine+deepcache", 0.5, settings)
    assert (few.label, mine.name, few.ratio) == ("few", "mine+deepcache", None)
    with few.applied(pipe):
        assert pipe.unet._agentsd.recipe == Recipe(PooledAgents(4))
    with parse_method("mine", 0.5, settings).applied(pipe):
        assert torch.equal(sample(pipe), expected)
    before = mine.key
    Recipe(AgentModule()).save(tmp_path / "focused")
    assert mine.key != before  # other settings, other images
    with pytest.raises(EvalError, match=r"mine\+deepcache: .* does not fit"), mine.applied(pipe):
        pass
    with pytest.raises(EvalError, match=r"did you mean mine\? use baseline, tomesd, .*, few, mine, a comp"):
        parse_method("mien", 0.5, settings)


def test_fewer_steps_are_the_same_sampler_with_so_many(pipe: Any) -> None:
    specs = from_prompts(["a cat"], 1, 3)
    of_five, of_two = (RunSettings(steps=steps, scheduler="ddim") for steps in (5, 2))
    (few,), _ = images_of_method(pipe, parse_method("agentsd@2", 0.5, of_five), specs, of_five)
    (two,), _ = images_of_method(pipe, parse_method("agentsd", 0.5, of_two), specs, of_two)
    (five,), _ = images_of_method(pipe, parse_method("agentsd", 0.5, of_five), specs, of_five)
    assert few.tobytes() == two.tobytes() != five.tobytes()


def test_rows_of_fewer_steps() -> None:
    def counts(steps: int, *shares: float) -> list[str]:
        return [method.label for method in fewer(shares, CompareSettings(steps=steps))]

    assert counts(50, 0.8, 0.6, 0.4) == ["baseline@40", "baseline@30", "baseline@20"]
    assert counts(12, 0.8, 0.6, 0.4) == ["baseline@10", "baseline@7", "baseline@5"]
    assert counts(2, 0.8, 0.6, 0.4) == ["baseline@1"]  # 1.6 is 2 again, 0.8 is 1 as 1.2
    assert counts(1, 0.5) == counts(50) == []
    methods = expand(["baseline@20", "agentsd", "fast"], [0.4], CompareSettings(steps=50), (0.4,))
    assert [(method.label, method.is_baseline) for method in methods] == [
        ("baseline", True),
        ("baseline@20", False),
        ("agentsd r=0.4", False),
        ("fast", False),
    ]


def test_what_saves_whole_calls_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODES, "fast", Recipe(steps=StepCache()))
    names = (
        "baseline",
        "agentsd",
        "tomesd",
        "no-attention",
        "fast",
        "deepcache-5",
        "agentsd+deepcache",
        "agentsd@20",
    )
    within = [parse_method(name, 0.4, SETTINGS).within_a_call for name in names]
    assert within == [True] * 4 + [False] * 4


def test_a_recipe_with_a_name_is_a_method(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe(Phases(None, Downsample(stride=4)))
    monkeypatch.setitem(MODES, "fast", recipe)
    method = parse_method("fast", 0.5, SETTINGS)
    assert method.ratio is None  # it has none
    with method.applied(pipe):
        assert pipe.unet._agentsd.recipe == recipe


def test_a_method_under_another_sampler(pipe: Any) -> None:
    """It is the run that has this sampler, and the pipeline gets its own back."""
    settings, specs = SETTINGS.model_copy(update={"steps": 9}), from_prompts(["a red circle"], 1, 0)
    method, scheduler = parse_method("fast@9/unipckarras", None, settings), pipe.scheduler
    assert (method.name, method.steps, method.is_baseline) == ("fast@9/unipckarras", 9, False)
    assert "/" not in method.key
    (image,), _ = images_of_method(pipe, method, specs, settings)
    assert pipe.scheduler is scheduler
    pipe.scheduler = UniPCMultistepScheduler.from_config(scheduler.config, use_karras_sigmas=True)
    (expected,), _ = images_of_method(pipe, parse_method("fast@9", None, settings), specs, settings)
    assert image.tobytes() == expected.tobytes()
    pipe.scheduler = scheduler
    (other,), _ = images_of_method(pipe, parse_method("fast@9", None, settings), specs, settings)
    assert other.tobytes() != expected.tobytes()
    assert parse_method("baseline/dpm++karras", None, settings) == parse_method("baseline", None, settings)
    other = parse_method("baseline/dpm++", None, settings)
    with parse_method("baseline/dpm++karras", None, RunSettings()).applied(pipe), other.applied(pipe):
        assert not pipe.scheduler.config.use_karras_sigmas  # whatever the run has
    with pytest.raises(EvalError, match=r"after the / stands a sampler, one of plms"):
        parse_method("fast/dmp", None, settings)


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_is_the_same_whichever_the_run_has(name: str) -> None:
    """Stepped through 8 steps, made of the model's own scheduler and of each other sampler."""

    def stepped(scheduler: Any) -> torch.Tensor:
        scheduler.set_timesteps(8)
        noise = {"generator": torch.Generator().manual_seed(0)}
        more = noise if "generator" in inspect.signature(scheduler.step).parameters else {}
        latent = torch.linspace(-1, 1, 64).view(1, 1, 8, 8)
        for t in scheduler.timesteps:
            output = torch.sin(scheduler.scale_model_input(latent, t))
            latent = scheduler.step(output, t, latent, return_dict=False, **more)[0]
        return latent

    own = PNDMScheduler(**BETAS)
    expected = stepped(scheduler_like(own, name))
    for other in SAMPLERS:
        assert torch.equal(stepped(scheduler_like(scheduler_like(own, other), name)), expected), other


def test_plain_rows_of_other_samplers() -> None:
    settings = RunSettings(scheduler="dpm++karras", steps=25)
    rows = expand(["fast"], [0.4], settings, (0.8, 0.6), ("dpm++karras", "unipckarras", "unipckarras"))
    assert [row.name for row in rows] == [
        *("baseline", "baseline@20", "baseline@15"),
        *("baseline/unipckarras", "baseline@20/unipckarras", "baseline@15/unipckarras"),
        "fast",
    ]
    assert len({row.key for row in rows}) == len(rows)
    assert len(expand(["fast"], [0.4], settings, (), ("unipckarras",))) == 2  # there is no run to compare
