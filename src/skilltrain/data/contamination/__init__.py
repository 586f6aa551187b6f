"""Training data that a benchmark asks for: what counts as that, and how it is taken out."""
