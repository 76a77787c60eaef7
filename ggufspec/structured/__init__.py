"""JSON schemas and grammars: what may follow in a text."""
