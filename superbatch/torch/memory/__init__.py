"""Memory of a device or the host: limits, peaks, and out-of-memory errors."""
