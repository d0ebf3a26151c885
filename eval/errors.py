"""The one error that ends a command with a message instead of a traceback."""


class EvalError(Exception):
    """A setting, a file or a machine that the command can't work with; the message names the way out."""
