"""The command `agentsd-dreambooth`, directly or through `accelerate launch -m agentsd.dreambooth`."""

import sys

_OF_TRAINING = ("peft", "pydantic", "rich", "typer")


def main(lora: bool = False) -> None:
    """Run the command; where a package of the extra `train` is not installed, say so."""
    try:
        from . import cli

        cli.main(cli.dreambooth_lora if lora else cli.dreambooth)
    except ModuleNotFoundError as error:
        if error.name not in _OF_TRAINING:
            raise
        print(f"error: {error.name} is not installed: pip install {error.name}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
