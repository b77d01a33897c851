"""The checks of the doctor. Each yields findings as dictionaries, without the file and the episode."""
