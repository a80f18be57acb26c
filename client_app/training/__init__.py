"""Local training: what a method asks for, and what carries it out."""
