"""Where in its run a call is, and how far the latent moved."""
