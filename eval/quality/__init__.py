"""What pictures are judged by: features, distances, fidelity, prompts."""
