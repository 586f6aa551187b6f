"""What lies behind a mean: which queries a reranker fixed, where a model looks, what fails, what an agent gains."""
