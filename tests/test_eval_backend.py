"""Attention is fused under every method, or under none: by the operations that really ran."""

import importlib
from collections import Counter

import pytest
import torch
from agentsd_eval.images.backend import attention_backend, unfused_attention
from agentsd_eval.images.methods import parse_method
from agentsd_eval.images.prompts import from_prompts
from agentsd_eval.images.sampling import sample
from agentsd_eval.settings import RunSettings
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from agentsd import Recipe, apply_agentsd
from agentsd.attention import formula
from agentsd.modules import AgentModule, FocusedLinear

OWN = ("pooled", "module", "linear")
METHODS = ("baseline", "tomesd", "todo", "agentsd", "fast", "agentsd+deepcache", *OWN)


class Ran(TorchDispatchMode):
    """How often fused attention, and a softmax, was computed."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__
        kind = "fused" if "scaled_dot_product" in name else "unfused" if "softmax" in name else ""
        self.counts[kind] += 1
        return func(*args, **kwargs or {})


@pytest.fixture(scope="module")
def named(make_pipeline, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    for name, operator in (("module", AgentModule()), ("linear", FocusedLinear())):
        with apply_agentsd(make_pipeline(), recipe=Recipe(operator)) as handle:
            handle.save(folder / name)
    pooled = {"recipe": {"attention": {"pooled_agents": {"count": 4}}}}
    return {"pooled": pooled, "module": folder / "module", "linear": folder / "linear"}


def ran(pipe, name, backend, named):
    settings = RunSettings(backend=backend, named=named, steps=8, scheduler="ddim")
    method = parse_method(name, 0.5, settings)
    with Ran() as found:
        sample(pipe, method, from_prompts(["a cat"], 1, 0), settings)
    return found.counts


@pytest.mark.parametrize("name", METHODS)
def test_all_attention_is_fused_or_none(pipe, name, named):
    """Text encoder and autoencoder, too: they are the same under every method."""
    fused, unfused = (ran(pipe, name, backend, named) for backend in ("sdpa", "unfused"))
    assert (fused["fused"] > 0, fused["unfused"]) == (True, 0)
    assert (unfused["unfused"], unfused["fused"]) == (fused["fused"], 0)
    assert ran(pipe, "baseline", "sdpa", {})["unfused"] == 0  # put back


def test_other_peoples_processors_are_unfused_too_and_stay(pipe):
    class Own:
        def __call__(self, attn, hidden_states, *args, **more):
            tokens = torch.nn.functional.scaled_dot_product_attention(*[hidden_states[:, None]] * 3)
            return attn.to_out[0](tokens[:, 0])

    name, own = next(iter(pipe.unet.attn_processors)), Own()
    pipe.unet.set_attn_processor(pipe.unet.attn_processors | {name: own})
    assert ran(pipe, "baseline", "unfused", {})["fused"] == 0
    assert pipe.unet.attn_processors[name] is own


def test_a_module_that_is_loaded_meanwhile_does_not_keep_ours(pipe, tmp_path, monkeypatch):
    (tmp_path / "late_module.py").write_text("from torch.nn.functional import scaled_dot_product_attention\n")
    monkeypatch.syspath_prepend(tmp_path)
    with attention_backend(pipe.unet, "unfused"):
        late = importlib.import_module("late_module")
        with attention_backend(pipe.unet, "unfused"):
            pass
        assert torch.nn.functional.scaled_dot_product_attention is unfused_attention
    assert late.scaled_dot_product_attention is scaled_dot_product_attention
    assert formula.scaled_dot_product_attention is scaled_dot_product_attention


@pytest.mark.parametrize("kind", ["plain", "scaled", "causal", "bool", "added", "grouped"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_it_is_torchs_attention(kind, dtype):
    rng = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 4, n, 8, generator=rng).to(dtype) for n in (5, 7, 7))
    mask = torch.rand(2, 1, 5, 7, generator=rng) > 0.3
    mask[..., 0] = True
    if kind == "grouped":
        key, value = key[:, :2], value[:, :2]
    more = {
        "plain": {},
        "scaled": {"scale": 8**-0.15},
        "causal": {"is_causal": True},
        "bool": {"attn_mask": mask},
        "added": {"attn_mask": torch.randn(2, 1, 5, 7, generator=rng).to(dtype)},
        "grouped": {"enable_gqa": True},
    }[kind]
    ours, theirs = (of(query, key, value, **more) for of in (unfused_attention, scaled_dot_product_attention))
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12 if dtype == torch.float64 else 5e-3)


def test_large_products_in_half_precision_are_scaled_before_they_are_rounded():
    """As AttnProcessor does; 40 products of 100 and 100 are more than float16 holds."""
    query = torch.full((1, 1, 2, 40), 100.0, dtype=torch.float16)
    assert unfused_attention(query, query, query).isfinite().all()
