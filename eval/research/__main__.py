"""The command line of the studies: `python -m agentsd_eval.research NAME --help`."""

from ..cli import make_program
from ..settings import CommandSettings
from . import settings as s

COMMANDS: dict[str, tuple[type[CommandSettings], str]] = {
    "metric-validation": (s.ValidationSettings, "research.metric_validation"),
    "priced": (s.PricedSettings, "research.priced"),
    "memory": (s.ComputedSettings, "research.computed_memory"),
    "cost": (s.CountedSettings, "research.computed_cost"),
    "intervals": (s.IntervalsSettings, "research.intervals"),
    "redundancy": (s.RedundancySettings, "research.redundancy"),
    "subject": (s.SubjectSettings, "research.subject"),
    "gpu": (s.GpuSettings, "research.gpu"),
}
"""Each one's settings and module."""

main = make_program("agentsd_eval.research", COMMANDS, str(__doc__))

if __name__ == "__main__":
    main()
