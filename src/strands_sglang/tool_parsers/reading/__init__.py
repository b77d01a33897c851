"""How turns are read, whatever the format: marks, structure, values, and calls of the usual shapes."""
