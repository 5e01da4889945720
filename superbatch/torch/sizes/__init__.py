"""How large micro-batches are: what fits in memory, what is fastest, and what an update needs."""
