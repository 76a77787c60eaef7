"""Measures pairs of models, and compares and plots the results; printing is left to cli."""
