"""Caching across steps: a cached step skips layers.

Nothing is cached in a run, and it says so once, where it has fewer than 8 steps, where its scheduler is made
for few (LCM, TCD), where its list of steps is not known, where an attention processor of an unknown kind may
have to see each call, and where the U-Net is called several times in a step on one text (panorama's crops). A
step is computed where gradients are on, and where what it would need was not kept (another text or shape).
What is kept is a thread's own, and is let go when the run ends.
"""

from .steps import StepCache

__all__ = ["StepCache"]
