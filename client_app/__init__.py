"""The client side: a NumPyClient for each method, and the ClientApp that runs the clients."""
