"""Trackers, which pass a run's record on to tracking tools or custom code."""
