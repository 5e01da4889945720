"""Loss of a micro-batch: its declaration, its weight, and the sums over a window."""
