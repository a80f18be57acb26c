"""A real federation: certificates, the SuperLink, warm SuperNodes, and runs submitted to them."""
