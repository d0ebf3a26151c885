"""What makes a run's images: methods, prompts, sampling, and the folder they are kept in."""
