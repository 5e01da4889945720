"""Memory of a device or the host: limits, peaks, and the errors that say it ran out."""
