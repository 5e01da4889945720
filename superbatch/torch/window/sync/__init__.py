"""Ranks that share a window."""
