"""A small Stable Diffusion that ships with the package, and the images that it was trained on."""

from .data import SUBJECT, Reference, load_references
from .pipeline_io import load_pipeline

__all__ = ["SUBJECT", "Reference", "load_pipeline", "load_references"]
