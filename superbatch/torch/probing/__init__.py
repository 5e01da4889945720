"""Experiments on a model and its loss: do samples see each other, is a split exact, what moves."""
