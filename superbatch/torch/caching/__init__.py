"""Two passes for a loss over embeddings: the parts of `cached_gradients`."""
