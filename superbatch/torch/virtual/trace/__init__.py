"""Recording of the operations on virtual tensors."""
