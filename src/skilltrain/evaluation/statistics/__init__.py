"""How far a mean over queries can be trusted, and whether two systems differ: intervals, tests, effect sizes."""
