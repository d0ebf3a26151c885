"""`python -m agentsd.dreambooth`, and `accelerate launch -m agentsd.dreambooth`."""

from .cli import main

if __name__ == "__main__":
    main()
