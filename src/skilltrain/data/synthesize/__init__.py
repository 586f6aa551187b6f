"""Queries for the skills of a pool: written by a chat model, or taken from the skills' own texts."""
