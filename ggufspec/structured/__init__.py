"""Constraints on generated text: JSON schemas, grammars, regular expressions and choices."""
