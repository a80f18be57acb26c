"""Data sets, their partition over clients, and the tensors that a client trains on."""
