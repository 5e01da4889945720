"""Synchronisation of the ranks that share a window."""
