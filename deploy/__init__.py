"""The processes of a real federation, based on Flower's processes: the SuperLink, and nodes with their workers."""
