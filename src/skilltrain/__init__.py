"""skilltrain fine-tunes the encoder and the reranker that route an agent's task to the right skill."""

__version__ = "0.1.0"
