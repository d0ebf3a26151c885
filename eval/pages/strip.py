"""What each call of a run was, as a strip of colours in HTML."""

from html import escape

KINDS = {"F": ("computed", "#1f5fa8"), "f": ("cached", "#a9cbee")}
"""Of each letter of `AgentSDHandle.summary`: its name and colour."""


def strip_of(summary: str) -> str:
    """Return a box for each call of `AgentSDHandle.summary`, and a line that names their colours."""
    calls = [letter for letter in summary.split("  ")[0] if letter in KINDS]
    boxes = "".join(
        f'<i style="flex:1;min-width:2px;background:{KINDS[letter][1]}" title="call {place}: '
        f'{KINDS[letter][0]}"></i>'
        for place, letter in enumerate(calls, 1)
    )
    names = "".join(
        f'<span style="white-space:nowrap"><i style="display:inline-block;width:.8em;height:.8em;'
        f'background:{colour}"></i> {calls.count(letter)} {name}</span>'
        for letter, (name, colour) in KINDS.items()
        if letter in calls
    )
    strip = "display:flex;gap:1px;height:1.6em"
    return (
        f'<div role="img" aria-label="{escape(summary)}" style="{strip}">{boxes}</div>'
        f'<div style="display:flex;flex-wrap:wrap;gap:0 1em;margin-top:.3em">{names}</div>'
    )
