from dataclasses import replace

import pytest
import torch
import yaml
from test_patch import call, snapshot
from tiny import make_unet

from agentsd import AgentConfig, LayerConfigs, apply_agentsd
from agentsd.layers import load_config

DOWN = "down_blocks.0.attentions.0.transformer_blocks.0.attn1"
MID = "mid_block.attentions.0.transformer_blocks.0.attn1"
UP = "up_blocks.2.attentions.1.transformer_blocks.0.attn1"
MERGE_ALL = AgentConfig(ratio=0.5, early="tome", late="tome", cells="first", late_ratio=0.3)
AGENTS = AgentConfig(ratio=0.0, late="none", cells="first")
UNTOUCHED = AgentConfig(early="none", late="none")


def test_a_file_holds_what_differs_and_reads_back_the_same(tmp_path):
    pooled = AgentConfig(agents="pool", agent_counts=(9,), parts=("bias",))
    layers = LayerConfigs({UP: MERGE_ALL, DOWN: pooled, MID: AgentConfig()}, {"error": 0.01, "cost": "time"})
    path = layers.save(tmp_path / "layers.yaml")
    content = yaml.safe_load(path.read_text())
    assert list(content["layers"]) == [UP, DOWN, MID]
    merges = {"ratio": 0.5, "early": "tome", "late": "tome", "late_ratio": 0.3, "cells": "first"}
    assert content["layers"][UP] == merges
    assert content["layers"][DOWN] == {"agents": "pool", "agent_counts": [9], "parts": ["bias"]}
    assert content["layers"][MID] == {}
    assert LayerConfigs.load(path) == layers
    assert load_config(path) == load_config(str(path)) == layers


def test_a_file_by_hand_needs_no_settings_and_no_figures(tmp_path):
    path = tmp_path / "layers.yml"
    path.write_text(f"layers:\n  {MID}:\n")
    assert LayerConfigs.load(path) == LayerConfigs({MID: AgentConfig()})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("layers: [", "is not YAML"),
        ("", "has no `layers:`"),
        ("- 1", "has no `layers:`"),
        ("layers: 3", "has no `layers:`"),
        ("layers: {}", "name a self-attention layer at least"),
        (
            "layers: {a: {rato: 0.3}}",
            r"layers.yaml, a: settings: \['rato'\] is unknown; the settings are agent",
        ),
        ("layers: {a: {ratio: 3}}", r"layers.yaml, a: ratio=3: pass a share"),
        ("layers: {a: {ratio: x}}", r"layers.yaml, a: ratio='x' is a str: pass a float"),
        ("layers: {a: 5}", "a: settings: 5 is unknown"),
        ("layers: {1: {}}", r"layers=\[1\]: name each by a string"),
        ("layers: {a: {early_frac: 0.3}, b: {}}", r"layers differ in their steps.*0\.3.*give all the same"),
        ("layers: {a: {}}\nmeasured: 3", "measured=3: it holds figures by name"),
    ],
)
def test_a_wrong_file_is_named_with_the_way_out(tmp_path, content, message):
    path = tmp_path / "layers.yaml"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        LayerConfigs.load(path)


def test_a_missing_file_says_how_to_make_one(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no such file; agentsd.calibrate\(...\).save\(path\)"):
        LayerConfigs.load(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    "other",
    [
        {"early_frac": 0.5},
        {"schedule": "distance", "agent_counts": (16, 0), "thresholds": (0.5,)},
    ],
)
def test_layers_share_their_steps(other):
    with pytest.raises(ValueError, match="layers differ in their steps"):
        LayerConfigs({MID: AgentConfig(), UP: AgentConfig(**other)})


def test_only_the_named_layers_are_patched_and_all_is_undone(pipe, sample, tmp_path):
    before, stock = snapshot(pipe.unet), sample(pipe)
    layers = LayerConfigs({UP: MERGE_ALL, DOWN: AGENTS})
    handle = apply_agentsd(pipe, config=layers)
    assert handle.layer_names == [DOWN, UP]
    assert handle.config is layers
    patched = {name for name, module in pipe.unet.named_modules() if hasattr(module, "_agentsd")}
    assert patched == {"", DOWN, UP}
    picture = sample(pipe)
    assert not torch.equal(picture, stock)
    handle.remove()
    assert snapshot(pipe.unet) == before
    with apply_agentsd(pipe, config=layers.save(tmp_path / "layers.yaml")):
        assert torch.equal(sample(pipe), picture)
    assert torch.equal(sample(pipe), stock)


def test_a_layer_that_does_nothing_is_bit_equal_to_stock(pipe, sample):
    stock = sample(pipe)
    with apply_agentsd(pipe, config=LayerConfigs({UP: UNTOUCHED, MID: UNTOUCHED})):
        assert torch.equal(sample(pipe), stock)


@pytest.mark.parametrize("config", [AgentConfig(levels=3), AgentConfig(levels=3, ratio=0.2, late="agent")])
def test_all_layers_alike_are_one_config(pipe, sample, config):
    handle = apply_agentsd(pipe, config=config)
    names, picture = handle.layer_names, sample(pipe)
    assert len(names) == 7
    apply_agentsd(pipe, config=LayerConfigs(dict.fromkeys(names, replace(config, levels=None))))
    assert torch.equal(sample(pipe), picture)


def output_of(unet, name, config, t):
    """What the named layer makes of the inputs it got, under the config alone: replayed on a stock model."""
    block = unet.get_submodule(name.removesuffix(".attn1"))
    seen = {}
    hooks = [
        block.register_forward_pre_hook(lambda module, args: seen.update(x=args[0])),
        block.attn1.register_forward_hook(lambda module, args, out: seen.update(out=out)),
    ]
    call(unet, t)
    for hook in hooks:
        hook.remove()

    alone = make_unet()
    twin = alone.get_submodule(name.removesuffix(".attn1"))
    twin.register_forward_pre_hook(lambda module, args: (seen["x"], *args[1:]))
    twin.attn1.register_forward_hook(lambda module, args, out: seen.update(expected=out))
    apply_agentsd(alone, config=LayerConfigs({name: config}))
    call(alone, t)
    return seen["out"], seen["expected"]


@pytest.mark.parametrize("t", [999, 1])
def test_each_layer_runs_its_own_settings(t):
    unet, settings = make_unet(), {DOWN: AGENTS, MID: MERGE_ALL, UP: replace(MERGE_ALL, ratio=0.7)}
    apply_agentsd(unet, config=LayerConfigs(settings))
    for name, config in settings.items():
        out, expected = output_of(unet, name, config, t)
        assert torch.equal(out, expected)
    if t == 999:  # the merged tokens of a destination are equal: the ratios show
        kept = {
            name: output_of(unet, name, config, t)[0][0].unique(dim=0).shape[0]
            for name, config in settings.items()
        }
        assert kept == {DOWN: 256, MID: 16 - 8, UP: 256 - int(256 * 0.7)}


def test_layers_of_other_settings_share_no_ranking_in_fast_mode():
    fast = replace(MERGE_ALL, mode="fast")
    unet = make_unet()
    handle = apply_agentsd(unet, config=LayerConfigs({DOWN: fast, UP: replace(fast, ratio=0.2)}))
    assert len({id(layer.group) for _, layer in handle._layers}) == 2
    call(unet)
    same = apply_agentsd(unet, config=LayerConfigs({DOWN: fast, UP: replace(fast)}))
    assert len({id(layer.group) for _, layer in same._layers}) == 1


def test_an_unknown_layer_is_refused_and_the_patch_in_force_stays(pipe, sample):
    apply_agentsd(pipe)
    picture = sample(pipe)
    with pytest.raises(
        ValueError, match=r"layers=\['mid.attn1'\]: UNet2DConditionModel has no such self-att"
    ):
        apply_agentsd(pipe, config=LayerConfigs({UP: AGENTS, "mid.attn1": AGENTS}))
    assert torch.equal(sample(pipe), picture)


def test_settings_by_layer_stand_alone(pipe):
    with pytest.raises(ValueError, match="pass it alone"):
        apply_agentsd(pipe, ratio=0.3, config=LayerConfigs({UP: AGENTS}))
