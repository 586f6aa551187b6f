"""Benchmarks as they are published, read into tasks: queries, gold skills, gains."""
