"""Tables 11 to 13: AgentSD at one ratio with one setting varied, beside the baseline."""

from dataclasses import replace

from rich.console import Console

from ..images.methods import Method, fewer, parse_method
from ..settings import AblateSettings
from . import table

PAPER_VALUES: dict[str, tuple[float, ...]] = {
    "k": (0.0, 0.025, 0.075, 0.15),
    "scale": (-0.5, -0.25, -0.15, -0.05),
    "early": (0.2, 0.4, 0.6, 0.8),
}
"""What Tables 11, 12 and 13 vary."""
_SETTING = {"k": "k", "scale": "scale", "early": "early_frac"}


def command(settings: AblateSettings, console: Console) -> None:
    """Print the tables, and write them."""
    table.show(settings, ablation_methods(settings), f"ablate-{settings.what}", console)


def ablation_methods(settings: AblateSettings) -> list[Method]:
    """Return the baseline, also in fewer steps, and AgentSD at each value."""
    methods = [parse_method("baseline", None, settings), *fewer(settings.fewer_steps, settings)]
    agentsd = parse_method("agentsd", settings.ablate_ratio, settings)
    for value in settings.ablate_values or PAPER_VALUES[settings.what]:
        methods.append(replace(agentsd, agent=((_SETTING[settings.what], value),)))
    return methods
