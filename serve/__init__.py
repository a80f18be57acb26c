"""Serve the models of a run with the Open Inference Protocol."""
