"""What may follow in a text: JSON schemas, grammars, regular expressions and choices."""
