"""SkyRL's configuration classes need this on Python 3.11: pydantic refuses `typing.TypedDict` before 3.12."""

import sys
import typing

import typing_extensions

if sys.version_info < (3, 12):
    typing.TypedDict = typing_extensions.TypedDict
