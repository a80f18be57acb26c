"""The processes of a real federation: the SuperLink, nodes and their workers, over Flower's own."""
