"""Strands' own tests, run with `SGLangModel` instead of their models: `make test-strands`."""
