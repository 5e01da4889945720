"""Rules that split operators along the samples."""
