"""The validation harness: decides what must run, proves that it ran, and judges how far off it was."""
