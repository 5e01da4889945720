"""Random streams per sample."""
