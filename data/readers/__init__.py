"""Readers for users' files, folders and functions, and for published data sets."""
