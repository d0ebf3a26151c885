"""The project's own studies, outside of the wheel: `python -m agentsd_eval.research NAME` in a clone."""
