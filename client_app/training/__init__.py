"""Local training: a method's requests, and the trainer that runs them."""
