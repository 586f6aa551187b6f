"""Queries for the skills of a pool: written by a chat model, or made of the bodies."""
