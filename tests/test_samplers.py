"""Every sampler that Stable Diffusion's pipelines take: what cached steps lose, and what corrections mend."""

import functools
from statistics import geometric_mean

import pytest
from logs import logged
from sampling import SAMPLERS, Denoiser

from agentsd import Recipe, StepCache, apply_agentsd

CACHE = {"interval": 2, "warmup_steps": 4}  # the last of 20 steps is computed, and corrects those before
FAMILIES = ("DDIM", "Euler", "DPM++ 2M", "EDM Euler", "PLMS")  # whose every prediction is tried each time
USED = ("UniPC", "DPM++ 2M, Karras", "Heun", "KDPM2", "Euler a", "DDIM inversion", "LCM")
"""Of these the first one is."""
CASES = [
    pytest.param(
        name, kind, marks=[pytest.mark.slow] * (name not in FAMILIES and (i > 0 or name not in USED))
    )
    for name, sampling in SAMPLERS.items()
    for i, kind in enumerate(sampling.predictions)
]


@functools.cache
def losses(name, prediction):
    """How far corrected runs, and others, end from one without caching; the calls, and what was said."""
    model, found, summaries = Denoiser(SAMPLERS[name], prediction), [], []
    expected = model.run()
    with logged() as messages:
        for correct in (True, False):
            handle = apply_agentsd(model, recipe=Recipe(steps=StepCache(**CACHE, correct=correct)))
            found.append(float((model.run() - expected).norm() / expected.norm()))
            summaries.append(handle.summary())
    return *found, summaries[0], " ".join(messages)


@pytest.mark.parametrize(("name", "prediction"), CASES)
def test_cached_steps(name, prediction):
    says = SAMPLERS[name].says
    corrected, plain, summary, words = losses(name, prediction)
    assert ("adds noise" in words) == ("noise is added" in says)
    assert ("for few steps" in words or "go up" in words) == says.startswith("off")
    assert bool(words) == ("says" in says or "warning" in says)
    if says.startswith("off"):
        assert corrected == 0
        assert set(summary.split()[0]) == {"F"}
        return
    assert "f" in summary
    assert "corrected" in summary
    assert corrected <= 1.2 * plain
    assert 0 < plain < 0.05


@pytest.mark.slow
def test_corrections_pay():
    """Over all samplers that are corrected."""
    cases = [case.values for case in CASES if SAMPLERS[case.values[0]].says.startswith("corrected")]
    runs = [losses(*case) for case in cases if case[1] == SAMPLERS[case[0]].predictions[0]]
    assert geometric_mean(corrected / plain for corrected, plain, *_ in runs) < 0.8
