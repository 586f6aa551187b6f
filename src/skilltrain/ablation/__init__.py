"""Ablations: a grid of variants and seeds, run to its end and compared with intervals."""
