"""The command line of the studies: `python -m agentsd_eval.research NAME --help`."""

from ..cli import make_program
from ..settings import CommandSettings, RunSettings
from . import settings as s
from .methods import register

COMMANDS: dict[str, tuple[type[CommandSettings], str]] = {
    "table": (RunSettings, "studies.table"),
    "metric-validation": (s.ValidationSettings, "research.metric_validation"),
    "mediators": (s.MediatorSettings, "research.mediators"),
    "redundancy": (s.RedundancySettings, "research.redundancy"),
    "profile": (s.ProfileSettings, "research.breakdown"),
    "priced": (s.PricedSettings, "research.priced"),
    "frontier": (s.FrontierSettings, "research.frontier"),
    "fid": (s.FidSettings, "research.fid"),
    "memory": (s.ComputedSettings, "research.computed_memory"),
    "time": (s.ModelledSettings, "research.modelled_time"),
    "gpu": (s.GpuSettings, "research.gpu"),
    "details": (s.DetailsSettings, "research.scene_details"),
}
"""Each one's settings and module; `table` is the evaluation's, with T-GATE and forecasts as methods."""

register()
main = make_program("agentsd_eval.research", COMMANDS, str(__doc__))

if __name__ == "__main__":
    main()
