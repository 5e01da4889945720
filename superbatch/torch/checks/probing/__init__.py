"""Probes of a model and a loss, for `verify` and the checks."""
