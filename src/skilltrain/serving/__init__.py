"""Routers: make, calibrate and serve them."""
