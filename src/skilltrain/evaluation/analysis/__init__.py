"""What lies behind a mean: which queries a reranker fixed, where a model looks, what an agent gains."""
