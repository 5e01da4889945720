"""Checks of the declared loss and of samples that influence each other."""
