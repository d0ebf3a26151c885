"""What to run where, measured on a user's own model."""

from .calls import calibrate_calls
from .search import calibrate

__all__ = ["calibrate", "calibrate_calls"]
