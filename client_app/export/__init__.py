"""Export of stored models to files that other programs can use without Posy."""
