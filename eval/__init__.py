"""Quality and cost of agent attention beside its baselines: the program `agentsd-eval`."""
