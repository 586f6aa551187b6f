"""Stage `filter`: takes false negatives out of rankings, each with a reason."""
