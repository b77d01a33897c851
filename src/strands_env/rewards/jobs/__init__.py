"""What runs in worker processes: a module per kind of job, with a function `handle(request, stage)`, and the loop.

Imported under another name and without the rest of the package, so that a worker starts fast and holds little.
"""
