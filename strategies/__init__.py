"""The server side: one Flower Strategy for each method, its settings and its mathematics."""
