"""Faults planted in csrc/, each of which the matrix must catch."""
