"""Where the numbers of a failing cell first part, layer by layer, then operation by operation."""
