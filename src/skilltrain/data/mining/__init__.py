"""Candidates for hard negatives, from four sources."""
