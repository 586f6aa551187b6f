"""From a query to a ranked list: dense, lexical, reranked."""
