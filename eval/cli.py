"""The command line of `agentsd-eval`: options in, one function call, tables out."""

import diffusers
import transformers

# Importing them adds their commands.
from . import cli_pictures as cli_pictures
from . import cli_studies as cli_studies
from . import cli_timing as cli_timing
from .command import app as app


@app.callback()
def start() -> None:
    """Quality and cost of agent attention (AgentSD) beside stock Stable Diffusion, ToMeSD and DeepCache."""
    # The libraries' remarks and bars would stand between a user and the table.
    for library in (diffusers.utils.logging, transformers.utils.logging):
        library.set_verbosity_error()
        library.disable_progress_bar()


def main() -> None:
    """Run the program (the script `agentsd-eval`)."""
    app()


if __name__ == "__main__":
    main()
