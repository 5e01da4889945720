"""Batch sizes and learning rates: growth, scaling and surveys, for every framework."""
