"""Runs that have been recorded: read back, compared, and laid out on a page."""
