"""Networks, built by name for a task."""
