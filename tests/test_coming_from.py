"""What the page for users of other packages says."""

import re
from pathlib import Path

import numpy as np
import pytest
import tomesd
from callers import deepcache, draw
from diffusers import DDIMScheduler

import agentsd

PAGE = (Path(__file__).parents[1] / "docs/how_to/coming_from.md").read_text(encoding="utf-8")
FIRST, *BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("name", ["apply_patch", "remove_patch"])
def test_a_name_of_the_authors_says_what_it_is_here(name):
    call = name.replace("patch", "agentsd")
    with pytest.raises(AttributeError, match=rf"{name}'.*call agentsd\.{call}\(pipe\)"):
        getattr(agentsd, name)
    with pytest.raises(AttributeError, match=r"no attribute 'anything'$"):
        _ = agentsd.anything


def made(pipe, steps=9):
    return draw(pipe, num_inference_steps=steps, output_type="np")


def applied(pipe, block, steps=9):
    names = {"pipe": pipe}
    exec(FIRST + block, names)
    image = made(pipe, steps)
    agentsd.remove_agentsd(pipe)
    return image


def test_each_call_of_the_page_does_what_the_other_package_does(pipe):
    pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config)  # DeepCache mistakes repeated timesteps
    merging, downsampling, caching = BLOCKS
    tomesd.apply_patch(pipe, ratio=0.5, use_rand=False)
    theirs = made(pipe, 2)  # over more steps rounding changes what is merged
    tomesd.remove_patch(pipe)
    ours = applied(pipe, merging.replace("ratio=0.5,", 'ratio=0.5, destinations="first",'), 2)
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    disable = deepcache(pipe)
    theirs = made(pipe)
    disable()
    np.testing.assert_allclose(applied(pipe, caching), theirs, atol=1e-4)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(applied(pipe, caching.replace("3", "2", 1)), theirs, atol=1e-4)
    assert np.abs(applied(pipe, downsampling) - made(pipe)).max() > 1e-3
