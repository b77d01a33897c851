"""The HTTP client of SGLang servers."""

from .client import SGLangClient

__all__ = ["SGLangClient"]
