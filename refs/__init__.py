"""The numpy reference: what a bundle holds is computed here, with the same bytes on every machine."""
