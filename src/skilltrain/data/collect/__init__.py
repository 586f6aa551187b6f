"""Skills from a registry over HTTP: its listing, its archives, and what was fetched so far."""
