"""Chat templates, and the prompt tokens that they produce."""
