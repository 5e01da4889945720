"""Size of the micro-batches: the largest in memory, the fastest, and the needs of an update."""
