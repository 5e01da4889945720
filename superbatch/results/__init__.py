"""Records that the library returns: frozen dataclasses of numbers and names."""
