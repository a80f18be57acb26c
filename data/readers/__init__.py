"""Readers of users' files, folders and functions, and of published data sets."""
