"""Size of the micro-batches: what fits in memory, what is fastest, and what an update needs."""
