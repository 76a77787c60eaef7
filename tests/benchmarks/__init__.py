"""Benchmarks and attacks that only maintainers run: `python -m tests.benchmarks.NAME`."""
