"""Measures pairs of models, compares and plots the results; prints nothing."""
