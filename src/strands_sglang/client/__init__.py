"""The HTTP client of SGLang servers."""

from .client import SGLangClient
from .loads import ServerLoad

__all__ = ["SGLangClient", "ServerLoad"]
