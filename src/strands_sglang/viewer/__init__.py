"""Recorded episodes as one HTML page that explains every token; nothing in it is ever requested from elsewhere."""

from .page import PageTooLargeError, check_size, render

__all__ = ["PageTooLargeError", "check_size", "render"]
