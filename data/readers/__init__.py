"""Read users' files, folders and functions, and published data sets."""
