"""Posy's ServerApp, which reads the run config, runs the rounds and records the results."""
