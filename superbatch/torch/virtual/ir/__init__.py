"""Intermediate representation: values, layouts and operator calls."""
