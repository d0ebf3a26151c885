"""Calls that are not made, or not in whole: neighbouring steps, and the two passes of guidance."""

from .guidance import ReuseGuidance
from .steps import ReuseSteps

__all__ = ["ReuseGuidance", "ReuseSteps"]
