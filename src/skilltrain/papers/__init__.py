"""The four papers' own parts; they import the core, and the core does not import them."""
