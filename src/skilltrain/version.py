"""The version, which all parts may name."""

__version__ = "0.1.0"
