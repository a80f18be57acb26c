"""Benchmarks and their shared modules."""
