"""Gradient caching, for exact gradients of losses over embeddings."""
