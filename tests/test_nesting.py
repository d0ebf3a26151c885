"""One patch after another, and a `with` block inside another."""

import gc
import weakref

import pytest
import torch
from recipes import AGENTS_THEN_KEYS, STEP_CACHING
from tiny import make_unet, snapshot

from agentsd import Merge, Phases, Recipe, apply_agentsd, remove_agentsd
from agentsd.apply import handle_of
from agentsd.recipe import AGENTSD


def test_apply_twice_equals_once_and_takes_the_new_settings(pipe, sample):
    before = snapshot(pipe.unet)
    first = apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS)
    once = sample(pipe)
    other = apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS.with_settings(ratio=0.7))
    assert not torch.equal(sample(pipe), once)
    first.remove()  # was replaced: must not touch the patch in force
    assert handle_of(pipe) is other
    apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS)
    assert torch.equal(sample(pipe), once)
    remove_agentsd(pipe)
    assert snapshot(pipe.unet) == before


def test_a_block_inside_another_puts_the_outer_patch_back(pipe, sample):
    before, baseline = snapshot(pipe.unet), sample(pipe)
    with apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS) as outer:
        first = sample(pipe)
        with apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS.with_settings(ratio=0.6)) as inner:
            second = sample(pipe)
            with apply_agentsd(pipe, recipe=Recipe(Phases(Merge(), None))):
                third = sample(pipe)
            assert handle_of(pipe) is inner
            assert torch.equal(sample(pipe), second)
        assert handle_of(pipe) is outer
        assert torch.equal(sample(pipe), first)
    assert snapshot(pipe.unet) == before
    assert torch.equal(sample(pipe), baseline)
    assert not any(torch.equal(a, b) for a, b in [(first, second), (second, third), (third, baseline)])


def test_plain_patches_in_a_row_keep_no_older_one_alive():
    """Only what a `with` block puts back is kept."""
    unet = make_unet()
    handles = [apply_agentsd(unet, recipe=AGENTS_THEN_KEYS.with_settings(seed=seed)) for seed in range(5)]
    oldest = weakref.ref(handles[0])
    del handles
    gc.collect()
    assert oldest() is None
    with (
        apply_agentsd(unet, recipe=AGENTS_THEN_KEYS.with_settings(seed=7)),
        apply_agentsd(unet, recipe=AGENTS_THEN_KEYS.with_settings(seed=8)),
    ):
        pass
    assert handle_of(unet).recipe.seed == 4


def test_blocks_that_are_left_in_another_order_end_at_the_baseline():
    unet = make_unet()
    clean = snapshot(unet)
    first, second, third = (
        apply_agentsd(unet, recipe=recipe).__enter__() for recipe in (AGENTSD, STEP_CACHING, AGENTSD)
    )
    for left, stays in ((second, third), (third, first), (first, None)):
        left.__exit__(None, None, None)
        assert handle_of(unet) is stays
    assert snapshot(unet) == clean


@pytest.mark.parametrize("away", ["remove", "remove_agentsd", "exit"])
def test_an_outer_handle_that_is_gone_does_not_come_back(away):
    unet = make_unet()
    clean = snapshot(unet)
    outer = apply_agentsd(unet, recipe=AGENTSD)
    ways = {
        "remove": outer.remove,
        "remove_agentsd": lambda: remove_agentsd(unet),
        "exit": lambda: outer.__exit__(None, None, None),
    }
    with apply_agentsd(unet, recipe=STEP_CACHING):
        ways[away]()
    assert handle_of(unet) is None
    assert snapshot(unet) == clean


def test_removal_follows_a_pipeline_whose_unet_was_exchanged(pipe):
    old = pipe.unet
    clean = snapshot(old)
    handle = apply_agentsd(pipe, recipe=AGENTSD)
    pipe.unet = make_unet()
    assert handle_of(old) is handle
    remove_agentsd(pipe)
    assert handle_of(old) is None
    assert snapshot(old) == clean
