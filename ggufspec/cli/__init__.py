"""The command line: one module per command; all arithmetic is in the library."""
