"""Batches: their structure, their samples, and how they are cut into micro-batches."""
