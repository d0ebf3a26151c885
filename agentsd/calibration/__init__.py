"""What to run where, measured on a user's own model."""

from .search import calibrate

__all__ = ["calibrate"]
