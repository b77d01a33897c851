"""What the next prompt is: chat templates, and the tokens of what they write."""
