"""Ablations: one resumable command over a grid of variants and seeds, and a table that says which differences count."""
