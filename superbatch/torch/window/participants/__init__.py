"""Participants: one file for each kind of state that a window may change."""
