"""Size of the micro-batches: the largest that fits in memory, the fastest, and the memory of an update."""
