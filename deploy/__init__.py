"""The processes of a real federation: the SuperLink, nodes and their workers, based on Flower's."""
