"""The command `agentsd-dreambooth-lora`, or `accelerate launch -m agentsd.dreambooth.lora`."""

from . import __main__ as dreambooth


def main() -> None:
    """As diffusers' `train_dreambooth_lora.py`: LoRA weights, of rank 4 if no other is given."""
    dreambooth.main(lora=True)


if __name__ == "__main__":
    main()
