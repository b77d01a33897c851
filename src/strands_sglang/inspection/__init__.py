"""Read recorded episodes of any supported kind, find what is wrong with them, and show them in a terminal."""
