"""Measures of rankings, their intervals, and benchmarks."""
