"""The window: a transaction over micro-batches that ends in one update."""
