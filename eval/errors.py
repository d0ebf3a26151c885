"""The one error that ends a command with a message instead of a traceback."""

from agentsd.command_line import shortened


class EvalError(Exception):
    """A setting, a file or a machine that the command can't work with; the message names the way out."""

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message))
