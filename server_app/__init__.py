"""The ServerApp: from the run config to a finished run."""
