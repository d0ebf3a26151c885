"""What makes a run's pictures: methods, prompts, sampling, and the folder they are kept in."""
