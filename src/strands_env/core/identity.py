"""Identities: an environment described as plain data, by its class and its constructor arguments.

An evaluation stores the identity with every result, so that results of different environments are never mixed. The same
program must get the same identity in every process. So an identity contains no memory addresses, and nothing that an
object has counted or collected since its creation.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import functools
import hashlib
import inspect
import math
import numbers
import re
from collections.abc import Callable, Mapping, Set
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any, TypeVar
from uuid import UUID

import numpy as np
from pydantic import BaseModel

from strands_sglang.shown import without_credentials

F = TypeVar("F", bound=Callable[..., Any])

_MAX_DEPTH = 8
_MAX_ITEMS = 1000
_NAMES = ("system_prompt", "model_id", "base_url", "name_or_path")
"""String attributes that identify an object of any class."""

_PLAIN = (numbers.Number, datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, range, UUID)
"""Classes of immutable values with a complete `repr`."""


class Identified:
    """Base class that records the constructor arguments of its subclasses."""

    _made_with: dict[type, tuple[tuple[Any, ...], dict[str, Any]]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Wrap a subclass's `__init__` to record its arguments."""
        super().__init_subclass__(**kwargs)
        function: Any = vars(cls).get("__init__")
        if function is not None:

            @functools.wraps(function)
            def init(self: Any, *args: Any, **kwargs: Any) -> None:
                vars(self).setdefault("_made_with", {})[cls] = (args, kwargs)
                function(self, *args, **kwargs)

            cls.__init__ = init  # type: ignore[method-assign]

    def identity(self) -> dict[str, Any]:
        """Describe the object by its class and its arguments, as JSON-like data. Default values are left out.

        Override this method to leave out arguments that results do not depend on, or to add what they depend on.
        """
        if not hasattr(self, "_made_with"):  # for example a dataclass
            return {**_object(self, 0), "arguments": describe(_fields(self), 1)}
        # The arguments by parameter, without those that equal the default. Arguments that a class passes on by
        # `**kwargs` are described by its base class.
        given: dict[str, Any] = {}
        defaults: dict[str, Any] = {}
        passed_on: dict[str, Any] = {}
        for cls, (args, kwargs) in self._made_with.items():
            signature = _signature(cls)
            bound = signature.bind(*args, **kwargs).arguments
            passed_on = {name: value for name, value in passed_on.items() if name not in signature.parameters}
            for name, parameter in signature.parameters.items():
                if name in bound and parameter.kind is parameter.VAR_KEYWORD:
                    passed_on.update(bound[name])
                elif name in bound and (parameter.kind is not parameter.VAR_POSITIONAL or len(self._made_with) == 1):
                    given.setdefault(name, bound[name])
            defaults = {**_defaults(cls), **defaults}
        described = {name: describe(value, 1) for name, value in {**passed_on, **given}.items()}
        arguments = {
            name: value for name, value in described.items() if name not in defaults or value != defaults[name]
        }
        return {"class": _name(type(self)), "arguments": arguments}


def describe(value: Any, depth: int = 0) -> Any:
    """Describe a value as plain data that is equal in every process of the same program."""
    if isinstance(value, enum.Enum):
        return describe(value.value, depth)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # NaN does not equal itself when it is read back
    if isinstance(value, str):
        return without_credentials(value)  # of a judge's or a tool's address: results do not depend on them
    if value is None or isinstance(value, bool | int | float):
        return value
    if depth >= _MAX_DEPTH:
        return _name(type(value))
    for kind, described in _FORMS:
        if isinstance(value, kind):
            return described(value, depth)
    if dataclasses.is_dataclass(value):
        return _record(value, _fields(value), depth)
    return _object(value, depth)


def _record(value: Any, fields: dict[str, Any], depth: int) -> dict[str, Any]:
    return {"class": _name(type(value)), **describe(fields, min(depth + 1, _MAX_DEPTH - 1))}


def _mapping(value: Mapping[Any, Any], depth: int) -> dict[str, Any]:
    # The `env` of a command, as of an MCP server, may contain secrets.
    is_command = "command" in value and isinstance(value.get("env"), Mapping)
    items = [item for item in value.items() if not (is_command and item[0] == "env")]
    return {str(key): describe(item, depth + 1) for key, item in items[:_MAX_ITEMS]}


def _array(value: Any, depth: int) -> Any:
    if value.dtype.hasobject:
        return _object(value, depth)
    if not value.ndim:
        return describe(value.tolist(), depth)
    content = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()[:16]
    return {"array": [str(value.dtype), *value.shape], "values": content}


_CONSTANT = (str, bytes, *_PLAIN, FunctionType, BuiltinFunctionType, type, Identified)


def _function(function: FunctionType, depth: int) -> Any:
    identity = getattr(function, "identity", None)
    if identity is not None:
        return identity
    name = f"{function.__module__}.{function.__qualname__}"
    if "<" not in name:
        return name
    # The name does not identify a lambda or a nested function: add its code, and the captured values that do not
    # change while the program runs.
    captured: dict[str, Any] = {}
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            content = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        if isinstance(content, str | FunctionType | type | Identified):
            captured[variable] = describe(content, depth + 1)
    # And the default values of its parameters: `lambda answer, limit=limit: ...`.
    presets = [*enumerate(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()]
    constant = {str(name): describe(preset, depth + 1) for name, preset in presets if isinstance(preset, _CONSTANT)}
    code = hashlib.sha256(_code(function.__code__)).hexdigest()[:16]
    described = {"function": name, "code": code, "captured": captured, "defaults": constant}
    return {name: content for name, content in described.items() if content}


# The first matching class decides how a value is described.
_FORMS: tuple[tuple[Any, Callable[[Any, int], Any]], ...] = (
    ((bytes, bytearray), lambda value, depth: hashlib.sha256(value).hexdigest()),
    ((np.ndarray, np.generic), _array),
    (_PLAIN, lambda value, depth: repr(value)),
    (PurePath, lambda value, depth: str(value)),
    (re.Pattern, lambda value, depth: [value.pattern, value.flags]),
    (Mapping, _mapping),
    ((list, tuple), lambda value, depth: [describe(item, depth + 1) for item in value[:_MAX_ITEMS]]),
    (Set, lambda value, depth: sorted((describe(item, depth + 1) for item in value), key=repr)),
    (Identified, lambda value, depth: value.identity()),
    (type, lambda value, depth: _name(value)),
    (
        functools.partial,
        lambda value, depth: {
            "function": describe(value.func, depth + 1),
            "given": describe([value.args, value.keywords], depth + 1),
        },
    ),
    (
        MethodType,
        lambda value, depth: {"method": value.__func__.__qualname__, "of": describe(value.__self__, depth + 1)},
    ),
    (FunctionType, _function),
    (
        (BuiltinFunctionType, np.ufunc),
        lambda value, depth: f"{getattr(value, '__module__', None) or type(value).__name__}.{value.__name__}",
    ),
    (BaseModel, lambda value, depth: _record(value, value.model_dump(), depth)),
)


def _code(code: CodeType) -> bytes:
    """Serialize names and constants; instructions differ between Python versions."""

    def constant(value: Any) -> bytes:
        if isinstance(value, CodeType):
            return _code(value)
        return repr(sorted(value, key=repr) if isinstance(value, frozenset) else value).encode()

    names = [name.encode() for name in (*code.co_names, *code.co_varnames)]
    return b"\0".join([*names, *(constant(value) for value in code.co_consts if value is not None)])


def _object(value: Any, depth: int) -> dict[str, Any]:
    """Describe an object without an identity: its class, and the attributes that no episode changes."""
    described: dict[str, Any] = {"class": _name(type(value))}
    for name in (*_NAMES, "reward_fn"):
        content = getattr(value, name, None)
        if isinstance(content, str) or (name == "reward_fn" and content is not None):
            described[name] = describe(content, depth + 1)
    get_config = getattr(value, "get_config", None)  # of Strands' models
    if callable(get_config) and not inspect.iscoroutinefunction(get_config):
        described["config"] = describe(get_config(), depth + 1)
    for name, content in getattr(value, "__dict__", {}).items():
        if isinstance(content, FunctionType | MethodType | type | Identified) and name not in described:
            if getattr(content, "__self__", None) is not value:
                described[name] = describe(content, depth + 1)
    return described


@functools.lru_cache(maxsize=256)
def _signature(cls: type) -> inspect.Signature:
    return inspect.signature(cls)


@functools.lru_cache(maxsize=256)
def _defaults(cls: type) -> dict[str, Any]:
    parameters = _signature(cls).parameters.items()
    return {
        name: describe(parameter.default, 1)
        for name, parameter in parameters
        if parameter.default is not inspect.Parameter.empty
    }


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _fields(value: Any) -> dict[str, Any]:
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    return {field.name: getattr(value, field.name, None) for field in fields}
