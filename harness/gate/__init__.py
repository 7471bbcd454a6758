"""The merge gate over a ledger: complete, green, from this checkout, with nothing waived that should not be."""
