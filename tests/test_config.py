import math

import numpy as np
import pytest

from agentsd import AgentConfig


def test_defaults_are_the_papers():
    config = AgentConfig()
    assert (config.ratio, config.k, config.scale, config.early_frac) == (0.4, 0.075, -0.15, 0.4)
    assert (config.agent_ratio, config.early_stride, config.late_stride) == (0.95, 4, 2)


@pytest.mark.parametrize(
    ("name", "value", "error", "way_out"),
    [
        ("ratio", 1.0, ValueError, r"\[0, 1\)"),
        ("ratio", -0.1, ValueError, r"\[0, 1\)"),
        ("ratio", math.nan, ValueError, "finite"),
        ("ratio", "0.4", TypeError, "pass a float"),
        ("ratio", True, TypeError, "pass a float"),
        ("k", -1, ValueError, "0 or more"),
        ("k", math.inf, ValueError, "finite"),
        ("scale", 0.54, ValueError, "exponent of the head width"),
        ("early_frac", 1.5, ValueError, r"\[0, 1\]"),
        ("early_frac", None, TypeError, "pass a float"),
        ("agent_ratio", 0, ValueError, r"\(0, 1\)"),
        ("levels", 0, ValueError, "1 "),
        ("levels", 1.0, TypeError, "pass a int"),
        ("early_stride", 1, ValueError, "2 or more"),
        ("late_stride", 0, ValueError, "2 or more"),
        ("mode", "quick", ValueError, "'exact' or 'fast' or 'turbo'"),
        ("late", "agents", ValueError, "'tome' or 'downsample' or 'none'"),
        ("late", 1, TypeError, "pass a str"),
        ("late_ratio", 0.3, ValueError, "late='tome' or 'agent'"),
        ("cells", "last", ValueError, "'first'"),
        ("seed", -1, ValueError, "2\\*\\*63"),
    ],
)
def test_bad_value_names_itself_and_the_way_out(name, value, error, way_out):
    with pytest.raises(error, match=rf"{name}=.*{way_out}") as caught:
        AgentConfig(**{name: value})
    assert repr(value) in str(caught.value)


def test_what_later_steps_run_by_default_depends_on_the_mode():
    for mode, does in (("exact", "tome"), ("fast", "downsample"), ("turbo", "downsample")):
        assert AgentConfig(mode=mode).does_late == does
    assert AgentConfig(mode="exact", late="downsample").does_late == "downsample"
    assert AgentConfig(mode="exact", late_ratio=0.3).late_ratio == 0.3


def test_numpy_numbers_and_integers_are_numbers():
    assert AgentConfig(ratio=np.float64(0.5), early_frac=1, scale=0, seed=np.int64(3)).early_frac == 1


def test_saved_and_loaded(tmp_path):
    config = AgentConfig(ratio=0.3, mode="fast", early_frac=1.0)
    assert AgentConfig.load(config.save(tmp_path)) == config
    assert AgentConfig.load(tmp_path) == config


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ('{"ratios": 0.3}', ValueError, "'ratios'.*is unknown.*early_frac"),
        ("[0.3]", ValueError, "0.3.*is unknown"),
        ("ratio: 0.3", ValueError, "is not JSON"),
        ('{"ratio": 3}', ValueError, "ratio=3"),
        (None, FileNotFoundError, "agentsd.json: no such file"),
    ],
)
def test_a_bad_file_names_itself(tmp_path, text, error, message):
    if text is not None:
        (tmp_path / "agentsd.json").write_text(text)
    with pytest.raises(error, match=message):
        AgentConfig.load(tmp_path)
