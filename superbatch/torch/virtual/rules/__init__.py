"""Rules of operators along the batch dimension."""
