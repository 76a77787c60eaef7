"""Predicts memory and speed, and chooses how many layers go on which device."""
