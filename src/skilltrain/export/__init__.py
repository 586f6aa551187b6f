"""Models as folders that others can open."""
