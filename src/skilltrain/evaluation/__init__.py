"""How good a ranking is: measures per query, benchmarks, bootstrap intervals, and the report that shows them."""
