"""The command `agentsd-dreambooth`, directly or through `accelerate launch -m agentsd.dreambooth`."""

import os
import sys

_OF_TRAINING = ("click", "peft", "pydantic", "rich")


def main(lora: bool = False) -> None:
    """Run the command; where a package of the extra `train` is not installed, say so."""
    # Threads that spin while they wait take the cores from those that work: 7 times the time beside another
    # busy program. OpenMP reads this when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its remarks would stand before an error's line
    try:
        from . import cli

        (cli.dreambooth_lora if lora else cli.dreambooth)()
    except ModuleNotFoundError as error:
        if error.name not in _OF_TRAINING:
            raise
        print(f"error: {error.name} is not installed: pip install {error.name}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
