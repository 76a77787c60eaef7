"""Whole passes of real models: what they take, one record of it, and what is chosen from it."""
