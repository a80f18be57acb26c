"""The client side: one NumPyClient for each method, and the ClientApp that calls them."""
