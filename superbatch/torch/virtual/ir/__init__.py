"""Intermediate representation: values, shardings and operator calls."""
