"""The tests, and what maintainers measure with: see benchmarks/."""
