"""Code of worker processes: the loop, and one module per kind of job with a function `handle(request, stage)`.

Workers import it under another name and without the rest of the package, to start fast and use little memory.
"""
