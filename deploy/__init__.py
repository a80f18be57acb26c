"""The processes of a real federation, based on Flower's: the SuperLink, and nodes with their workers."""
