"""Structure of batches, their samples, and their split into micro-batches."""
