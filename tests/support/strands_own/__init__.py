"""Strands' own tests with `SGLangModel` in the place of their models: `make test-strands`."""
