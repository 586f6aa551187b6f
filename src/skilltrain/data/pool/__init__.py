"""Skills from many sources become one pool: files parsed, ids made unique, categories given."""
