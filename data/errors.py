"""What is raised when the data on disk is not what it should be."""


class DataError(ValueError):
    """Data is missing, damaged, or holds values that cannot be used."""
