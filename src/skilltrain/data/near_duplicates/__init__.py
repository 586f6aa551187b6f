"""Which skills of a pool are copies of one another."""
