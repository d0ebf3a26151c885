"""The one error that ends a command with a message instead of a traceback."""

import re

_LONG, _MOST = 300, 1200
_WORD = re.compile(rf"\S{{{_LONG},}}")
_QUOTED = re.compile(rf"(?<!\w)(['\"])(?:(?!\1(?!\w)).){{{_LONG},}}\1(?!\w)", re.S)


def shortened(message: str) -> str:
    """Return a message whose long words and quoted values have but their beginning and their end."""
    for long in (_QUOTED, _WORD):
        message = long.sub(lambda found: f"{found[0][:60]}...{found[0][-60:]}", message)
    half = _MOST // 2
    return message if len(message) <= _MOST else f"{message[:half]}...{message[-half:]}"


class EvalError(Exception):
    """A setting, a file or a machine that the command can't work with; the message names the way out."""

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message))
