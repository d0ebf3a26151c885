"""Faults that were found and mended, each a test that the old code fails.

One patch after another, and a `with` block inside another.
"""

import gc
import weakref

import pytest
import torch
from recipes import AGENTS_THEN_KEYS
from tiny import snapshot

from agentsd import Merge, Phases, Recipe, apply_agentsd


@pytest.mark.parametrize(
    "beside", [{"ratio": 0.3}, {"k": 0.07}, {"early_frac": 0.5}, {"mode": "fast"}, {"seed": 1}]
)
def test_a_setting_beside_a_recipe_is_refused(pipe, beside):
    with pytest.raises(ValueError, match=rf"{next(iter(beside))}.*beside recipe=.*pass it alone"):
        apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS, **beside)
    assert not hasattr(pipe.unet, "_agentsd")


def test_a_block_inside_another_puts_the_outer_patch_back(pipe, sample):
    before, baseline = snapshot(pipe.unet), sample(pipe)
    with apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS) as outer:
        first = sample(pipe)
        with apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS.with_settings(ratio=0.6)) as inner:
            second = sample(pipe)
            with apply_agentsd(pipe, recipe=Recipe(Phases(Merge(), None))):
                third = sample(pipe)
            assert pipe.unet._agentsd is inner
            assert torch.equal(sample(pipe), second)
        assert pipe.unet._agentsd is outer
        assert torch.equal(sample(pipe), first)
    assert snapshot(pipe.unet) == before
    assert torch.equal(sample(pipe), baseline)
    assert not any(torch.equal(a, b) for a, b in [(first, second), (second, third), (third, baseline)])


def test_plain_patches_in_a_row_keep_no_older_one_alive(pipe):
    """Only what a `with` block puts back is kept."""
    handles = [apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS.with_settings(seed=seed)) for seed in range(5)]
    oldest = weakref.ref(handles[0])
    del handles
    gc.collect()
    assert oldest() is None
    with (
        apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS.with_settings(seed=7)),
        apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS.with_settings(seed=8)),
        apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS.with_settings(seed=9)),
    ):
        pass
    assert pipe.unet._agentsd.recipe.seed == 4
