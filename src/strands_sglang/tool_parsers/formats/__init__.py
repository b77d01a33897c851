"""The tool call formats: one module for each group of models, with the parsers that read them."""
