"""What runs in the sandbox's own process: the standard library only, and nothing of the caller's process."""
