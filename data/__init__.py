"""Data sets, their partition among clients, and the tensors that a client trains on."""
