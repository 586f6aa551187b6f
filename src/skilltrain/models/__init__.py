"""The two models: an encoder that finds candidates, a reranker that orders them."""
