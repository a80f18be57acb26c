"""Local training: the requests of a method, and the trainer that runs them."""
