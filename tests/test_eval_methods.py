"""Methods: parsed by name, applied, and every trace of them removed."""

import inspect
import re

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
from tiny import BETAS, make_sdxl_unet, make_unet, snapshot

from agentsd import Downsample, Phases, PooledAgents, Recipe, StepCache, apply_agentsd
from agentsd.modules import AgentModule, FocusedLinear
from agentsd.recipe import AGENTSD, MODES

SETTINGS = CompareSettings()
EVERY = (
    "baseline", "tomesd", "agentsd", "todo", "deepcache", "spectrum", "easycache-60", "agentsd+deepcache",
    "tomesd+deepcache", "no-attention", "no-attention-all",
)  # fmt: skip


def image_of(pipe, name, settings, ratio=0.5):
    """A method's image of one prompt and seed, as bytes."""
    specs = from_prompts(["a cat"], 1, 3)
    [image], _ = images_of_method(pipe, parse_method(name, ratio, settings), specs, settings)
    return image.tobytes()


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("backend", ["sdpa", "unfused"])
def test_methods_act_and_leave_no_trace(pipe, sample, name, backend):
    baseline = sample(pipe)
    before = snapshot(pipe.unet)
    processors = pipe.unet.attn_processors
    with parse_method(name, 0.5, CompareSettings(backend=backend)).applied(pipe):
        inside = sample(pipe)
    assert torch.equal(inside, baseline) == (name == "baseline" and backend == "sdpa")
    assert snapshot(pipe.unet) == before
    assert all(pipe.unet.attn_processors[key] is processor for key, processor in processors.items())
    assert torch.equal(sample(pipe), baseline)


def test_methods_are_removed_after_an_error(pipe):
    before = snapshot(pipe.unet)
    with pytest.raises(KeyError), parse_method("agentsd+deepcache", 0.5, SETTINGS).applied(pipe):
        raise KeyError
    assert snapshot(pipe.unet) == before


def test_a_mode_runs_its_recipe_at_the_ratio_where_that_has_one(pipe, monkeypatch):
    other = Recipe(Phases(None, Downsample(stride=4)))
    monkeypatch.setitem(MODES, "fast", other)
    merging = AGENTSD.with_settings(ratio=0.5)
    for name, ratio, recipe in (("agentsd+deepcache", 0.5, merging), ("fast", None, other)):
        method = parse_method(name, 0.5, SETTINGS)
        assert method.ratio == ratio
        with method.applied(pipe):
            assert pipe.unet._agentsd.recipe == recipe
    assert re.fullmatch("agentsd-r0.5-[0-9a-f]{8}-sdpa", parse_method("agentsd", 0.5, SETTINGS).key)


def test_every_mode_is_a_methods_name():
    """Names are read before torch is loaded, which the modes themselves load."""
    assert set(MODE_NAMES) == set(MODES)
    assert all(map(is_method, (*MODES, *METHODS)))


def test_images_of_a_modes_other_recipe_are_not_taken_for_its_own(monkeypatch):
    """Under an earlier version's key they would be found again, and stand in the new one's row."""
    names = ("fast", "fast@9", "fast+deepcache", "tomesd")
    before = {name: parse_method(name, 0.4, SETTINGS).key for name in names}
    monkeypatch.setitem(MODES, "fast", Recipe(steps=StepCache(3)))
    same = [name for name in names if parse_method(name, 0.4, SETTINGS).key == before[name]]
    assert same == ["tomesd"]


def test_reseeded_tomesd_repeats_its_images(pipe, sample):
    method = parse_method("tomesd", 0.5, SETTINGS)

    def run(seed):
        torch.rand(3)  # whatever else draws from the global generator
        with method.applied(pipe, seed):
            return sample(pipe)

    assert torch.equal(run(0), run(0))
    assert not torch.equal(run(0), run(1))


def test_tomesd_is_no_silent_no_op_on_sdxl():
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
        ("tome", "unknown method 'tome'; did you mean tomesd.? use baseline, tomesd, .*agentsd"),
        ("no-attentio", "unknown method 'no-attentio'; use baseline"),
        ("TeaCache", "docs/how_to/coming_from.md compares it"),
        ("agentsd+baseline", "unknown method 'baseline'"),
        ("agentsd+tomesd", "name one method, and deepcache beside it"),
        ("deepcache+deepcache-5", "name one method, and deepcache beside it"),
        ("agentsd-fats", "unknown method 'agentsd-fats'; did you mean agentsd"),
        ("deepcache-0", "unknown method 'deepcache-0'"),
        ("baseline@0", "after the @ stands a number of steps, as in baseline@20"),
        ("baseline@1001", "after the @ stands a number of steps"),
        ("baseline@many", "after the @ stands a number of steps"),
    ],
)
def test_unknown_methods_are_named(name, message):
    with pytest.raises(EvalError, match=message):
        parse_method(name, 0.4, SETTINGS)


def test_deepcache_is_refused_where_it_would_mistake_its_step():
    three, two = (parse_method(name, None, SETTINGS) for name in ("deepcache", "deepcache-2"))
    assert (three.interval, two.interval) == (3, 2)
    plms = PNDMScheduler(**BETAS, skip_prk_steps=True)
    check_schedulers([three], plms, 20)  # the one repeated timestep falls where the cache is used anyway
    check_schedulers([two], DDIMScheduler(**BETAS), 20)
    check_schedulers([Method(("agentsd",), 0.5)], HeunDiscreteScheduler(**BETAS), 20)
    for method, scheduler in ((three, HeunDiscreteScheduler(**BETAS)), (two, plms)):
        with pytest.raises(EvalError, match=r"DeepCache mistakes call .* use --scheduler ddim"):
            check_schedulers([method], scheduler, 20)


def test_methods_by_a_name_of_ones_own(pipe, sample, tmp_path):
    with apply_agentsd(pipe, recipe=Recipe(FocusedLinear())) as handle:
        handle.save(tmp_path / "focused")
        expected = sample(pipe)
    pooled = {"recipe": {"attention": {"pooled_agents": {"count": 4}}}}
    settings = CompareSettings(named={"few": pooled, "mine": tmp_path / "focused"})
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


def test_fewer_steps_are_the_same_sampler_with_so_many(pipe):
    of_five, of_two = (RunSettings(steps=steps, scheduler="ddim") for steps in (5, 2))
    assert image_of(pipe, "agentsd@2", of_five) == image_of(pipe, "agentsd", of_two)
    assert image_of(pipe, "agentsd@2", of_five) != image_of(pipe, "agentsd", of_five)


def test_rows_of_fewer_steps():
    def counts(steps, *shares):
        return [method.label for method in fewer(shares, CompareSettings(steps=steps))]

    assert counts(50, 0.8, 0.6, 0.4) == ["baseline@40", "baseline@30", "baseline@20"]
    assert counts(12, 0.8, 0.6, 0.4) == ["baseline@10", "baseline@7", "baseline@5"]
    assert counts(2, 0.8, 0.6, 0.4) == ["baseline@1"]  # 1.6 is 2 again, 0.8 is 1 as 1.2
    assert counts(1, 0.5) == counts(50) == []
    methods = expand(["baseline@20", "agentsd", "fast"], [0.2, 0.4], CompareSettings(steps=50), (0.4,))
    agentsd = ["agentsd r=0.2", "agentsd r=0.4"]
    assert [method.label for method in methods] == ["baseline", "baseline@20", *agentsd, "fast"]
    assert [method.is_baseline for method in methods] == [True, False, False, False, False]
    assert len({method.key for method in methods}) == 5


def test_what_saves_whole_calls_is_known(monkeypatch):
    monkeypatch.setitem(MODES, "fast", Recipe(steps=StepCache()))
    within, across = ("agentsd", "tomesd", "no-attention"), ("fast", "deepcache-5", "agentsd+deepcache")
    found = [parse_method(name, 0.4, SETTINGS) for name in ("baseline", *within, *across, "agentsd@20")]
    assert [method.within_a_call for method in found] == [True] * 4 + [False] * 4


def test_a_method_under_another_sampler_is_the_run_that_has_it(pipe):
    settings, scheduler = SETTINGS.model_copy(update={"steps": 9}), pipe.scheduler
    method = parse_method("fast@9/unipckarras", None, settings)
    assert (method.name, method.steps, method.is_baseline) == ("fast@9/unipckarras", 9, False)
    assert "/" not in method.key
    image, own = (image_of(pipe, name, settings) for name in (method.name, "fast@9"))
    assert pipe.scheduler is scheduler
    pipe.scheduler = UniPCMultistepScheduler.from_config(scheduler.config, use_karras_sigmas=True)
    assert image == image_of(pipe, "fast@9", settings) != own


def test_the_runs_own_sampler_is_none_of_a_methods_own(pipe):
    karras = parse_method("baseline/dpm++karras", None, SETTINGS)
    assert karras == parse_method("baseline", None, SETTINGS)
    with karras.applied(pipe), parse_method("baseline/dpm++", None, SETTINGS).applied(pipe):
        assert not pipe.scheduler.config.use_karras_sigmas  # whatever the run has
    with pytest.raises(EvalError, match=r"after the / stands a sampler, one of plms"):
        parse_method("fast/dmp", None, SETTINGS)


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_is_the_same_whichever_the_run_has(name):
    """Stepped through 8 steps, made of the model's own scheduler and of each other sampler."""

    def stepped(scheduler):
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


def test_plain_rows_of_other_samplers():
    settings = RunSettings(scheduler="dpm++karras", steps=25)
    rows = expand(["fast"], [0.4], settings, (0.8, 0.6), ("dpm++karras", "unipckarras", "unipckarras"))
    plain = ["baseline", "baseline@20", "baseline@15"]
    assert [row.name for row in rows] == [*plain, *(f"{name}/unipckarras" for name in plain), "fast"]
    assert len({row.key for row in rows}) == len(rows)
    assert len(expand(["fast"], [0.4], settings, (), ("unipckarras",))) == 2  # there is no run to compare
