"""Tables and texts of the experiments."""
