"""The builder of a benchmark's Hard tier: skills that look like its gold skills and do something else."""
