"""Gradient caching: exact gradients of losses over embeddings."""
