"""Measurements; each script prints JSON."""
