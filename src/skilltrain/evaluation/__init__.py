"""How good a ranking is: measures per query, benchmarks, intervals and tests, and analyses."""
