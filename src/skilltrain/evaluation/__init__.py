"""Evaluation of systems on benchmarks, its analyses, pages, ablations and candidates."""
