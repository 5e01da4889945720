"""Noise of the gradient, measured from the micro-batches of windows."""
