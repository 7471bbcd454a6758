"""The matrix on other machines over SSH: hosts, links, synchronised trees, shared cells."""
