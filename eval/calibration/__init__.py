"""The recipe that meets a goal on a user's own model and prompts."""
