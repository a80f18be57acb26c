"""Benchmarks, and the modules that they share."""
