"""The server side: a Flower ``Strategy`` for each method, with the method's settings and mathematics."""
