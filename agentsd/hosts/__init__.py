"""What the patch must know of what it did not make: the model, and the scheduler of the run that calls."""
