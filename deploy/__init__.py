"""The processes of a real federation, which extend Flower's: the SuperLink, and nodes with their workers."""
