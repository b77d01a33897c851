"""Model factories: what makes the model of an episode, from arguments or from plain data."""
