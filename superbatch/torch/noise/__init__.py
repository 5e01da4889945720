"""The noise of the gradient, measured by hooks while training."""
