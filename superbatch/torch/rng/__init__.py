"""Random streams for each sample."""
