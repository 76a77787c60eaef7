"""Predicts memory and speed, and chooses where layers go."""
