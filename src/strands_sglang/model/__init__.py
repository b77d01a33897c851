"""`SGLangModel`, and what one call of it does."""

from .model import SGLangModel

__all__ = ["SGLangModel"]
