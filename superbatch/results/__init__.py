"""Result types of the library: frozen dataclasses of numbers and names."""
