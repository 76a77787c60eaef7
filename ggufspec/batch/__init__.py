"""Generates text for many prompts in worker processes, and keeps every finished record."""
