"""Measurements and what they say. No click, no echo."""
