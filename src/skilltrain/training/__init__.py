"""One loop on accelerate, for both models."""
