"""R3: an LLM's rejections as graded supervision."""
