"""Code that runs in the sandbox's process. It only imports the standard library."""
