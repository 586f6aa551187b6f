"""False negatives taken out of rankings, each with a reason."""
