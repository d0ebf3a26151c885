"""What images are measured by: features, distances, fidelity, prompts."""
