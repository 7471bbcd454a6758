"""Several devices that share one model: the ranks of a ``torchrun`` job, and the engine that stands before them."""
