"""How good a ranking is: measures per query, benchmarks, statistics, analyses, and the report that shows them."""
