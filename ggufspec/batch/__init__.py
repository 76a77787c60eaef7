"""Generates text for many prompts in worker processes; no finished record is lost."""
