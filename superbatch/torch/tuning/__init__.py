"""Batch sizes and learning rates for torch optimizers."""
