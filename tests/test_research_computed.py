"""Memory that is computed from shapes: against what is allocated, and by hand."""

import json
from itertools import accumulate

import pytest
import torch
from agentsd_eval.cost.macs import macs
from agentsd_eval.images.methods import parse_method
from agentsd_eval.research.computed_cost import steps_of
from agentsd_eval.research.computed_memory import denoise, in_dtype, unet
from agentsd_eval.settings import Settings
from torch.profiler import ProfilerActivity, profile

from agentsd.dreambooth.counting import Storages, fused_attention

TINY = {
    "sample_size": 64,
    "block_out_channels": (32, 64),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "layers_per_block": 1,
    "attention_head_dim": 4,
    "cross_attention_dim": 32,
}
METHODS = ["baseline", "agentsd", "fast"]


def counted(method):
    """The peak above the weights of a run on shapes."""
    with Storages("meta") as storages, fused_attention():
        model = in_dtype(lambda: unet(TINY), torch.float32, "meta")
        weights = storages.peak = storages.live
        denoise(parse_method(method, 0.4, Settings()), model, 512, 2, 8)
    return storages.peak - weights


def test_a_storage_counts_once_and_until_it_is_freed():
    with Storages("cpu") as storages:
        whole = torch.zeros(1000)
        part = whole[10:20]
        assert storages.live == 4000
        del whole
        assert storages.live == 4000  # a view holds it
        other = part + 1
        assert (storages.live, storages.peak) == (4040, 4040)
        del part, other
        assert (storages.live, storages.peak) == (0, 4040)


def allocated(method, path):
    """The peak of what PyTorch's allocator gave out in the same run on a CPU, from its profiler's trace."""
    model, parsed = unet(TINY), parse_method(method, 0.4, Settings())
    denoise(parsed, model, 64, 1, 8)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        denoise(parsed, model, 512, 2, 8)
    trace.export_chrome_trace(str(path))
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["name"] == "[memory]"]
    return max(accumulate(event["args"]["Bytes"] for event in sorted(events, key=lambda event: event["ts"])))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_as_much_is_counted_as_is_allocated(method, tmp_path):
    assert counted(method) == pytest.approx(allocated(method, tmp_path / "trace.json"), rel=0.02)


def test_residuals_and_features_are_counted():
    baseline, agentsd = counted("baseline"), counted("fast")
    features_of_two_passes = 2 * 2 * 32 * 64 * 64 * 4
    assert agentsd - baseline >= features_of_two_passes


@pytest.mark.parametrize("method", METHODS)
def test_steps_multiply_what_a_real_run_does(method):
    """On a CPU a look at each latent adds a little."""
    steps, parsed, model = steps_of(method, TINY, 256, 9), parse_method(method, None, Settings()), unet(TINY)
    found = macs(lambda: denoise(parsed, model, 256, 1, 9))
    assert sum(of for of, _ in steps) == pytest.approx(found, rel=1e-3)
    assert (steps[3][0] < steps[2][0] / 2) == (method == "fast")
