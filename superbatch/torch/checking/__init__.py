"""Comparison of a micro-batch's loss and gradient with those of its parts."""
