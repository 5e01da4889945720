"""Execution of a recording, one micro-batch at a time."""
