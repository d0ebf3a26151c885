"""Calls that are not made, or not in whole: neighbouring steps, and the two passes of guidance.

A run stays whole, and says so once, where it has fewer than 8 steps, where its scheduler is made for few
(LCM, TCD), where its list of steps is not known, where an attention processor of an unknown kind may have to
see each call, and where the U-Net is called several times in a step on one text (panorama's crops). A call
stays whole where gradients are on, and where what it would need was not kept (another text or shape). Three
passes in a batch are not halved. What is kept is a thread's own, and is let go when the run ends.
"""

from .guidance import ReuseGuidance
from .steps import ReuseSteps

__all__ = ["ReuseGuidance", "ReuseSteps"]
