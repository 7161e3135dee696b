"""The arguments of public methods, checked against their annotations before anything is done with them.

A wrong type gets an InvalidField that names the argument, its value and what is allowed. Without this it would get
Python's own error from some line inside, or pass: a text is a sequence of letters, True is the number 1.
"""

from __future__ import annotations

import ast
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import numpy as np

from .errors import InvalidField

C = TypeVar("C", bound=type)
_MOST = 1e18
"""More seconds, or more of anything, than there are. A float holds it, and asyncio's clock can wait for it."""


def each_is(name: str, items: Iterable[Any], kind: Any, allowed: str) -> list[Any]:
    """The items, also of a generator. Raises InvalidField for the first one that is no `kind`, a type or a union."""
    if not _items(items):
        raise InvalidField(name, items, f"a list or another iterable, of which each item is {allowed}")
    given = list(items)
    for place, item in enumerate(given):
        if not isinstance(item, kind):
            raise InvalidField(f"{name}[{place}]", item, allowed)
    return given


def whole_number(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """The value as an integer of Python's, also of numpy's and torch's. Others would not survive a checkpoint in JSON.

    Raises InvalidField for what is no integer, and for one that is below `least` or above `most`.
    """
    allowed = "an integer"
    if least is not None:
        allowed += f", at least {least}"
    if most is not None:
        allowed += f", at most {most}"
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or (least is not None and number < least) or (most is not None and number > most):
        raise InvalidField(name, value, allowed)
    return number


class _Kind(NamedTuple):
    """told: for people. fits(value): whether a value is of this kind."""

    told: str
    fits: Callable[[Any], bool]


def _number(value: Any) -> bool:
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    return number and bool(-_MOST <= value <= _MOST or value == float("inf"))


def _items(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)


_KINDS: Mapping[str, _Kind] = {
    "None": _Kind("None", lambda value: value is None),
    "bool": _Kind("True or False", lambda value: isinstance(value, bool | np.bool_)),
    "int": _Kind("an integer", lambda value: isinstance(value, int | np.integer) and not isinstance(value, bool)),
    "float": _Kind("a number", _number),
    "str": _Kind("a text", lambda value: isinstance(value, str)),
    "Callable": _Kind("a function", callable),
    "Mapping": _Kind("a mapping", lambda value: isinstance(value, Mapping)),
    "Iterable": _Kind("a list or another iterable", _items),
    "Sequence": _Kind("a list or another sequence", lambda value: _items(value) and hasattr(value, "__len__")),
}


def checks_arguments(*classes: type) -> Callable[[C], C]:
    """A class decorator: every public method of the class, and its constructor, checks its arguments.

    classes: those of this package that annotations name and whose instances are to be checked, too. Only the outermost
    type of an argument is looked at. An argument whose annotation names anything else is left to the method.
    """
    kinds = {**_KINDS, **{one.__name__: _instance_of(one) for one in classes}}

    def decorate(cls: C) -> C:
        for name, method in list(vars(cls).items()):
            if inspect.isfunction(method) and (name == "__init__" or not name.startswith("_")):
                setattr(cls, name, _checking(method, kinds))
        return cls

    return decorate


def _instance_of(cls: type) -> _Kind:
    return _Kind(f"a {cls.__name__}", lambda value: isinstance(value, cls))


def _checking(method: Callable[..., Any], kinds: Mapping[str, _Kind]) -> Callable[..., Any]:
    checks: list[tuple[int | None, str, list[_Kind]]] = []
    for place, argument in enumerate(inspect.signature(method).parameters.values()):
        heads = list(_heads(argument.annotation)) if argument.kind not in {argument.VAR_KEYWORD} else []
        if heads and all(head in kinds for head in heads):
            where = None if argument.kind is argument.KEYWORD_ONLY else place
            checks.append((where, argument.name, [kinds[head] for head in heads]))
    if not checks:
        return method

    def check(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for place, name, allowed in checks:
            if name in kwargs:
                value = kwargs[name]
            elif place is not None and place < len(args):
                value = args[place]
            else:
                continue
            if not any(kind.fits(value) for kind in allowed):
                raise InvalidField(name, value, " or ".join(kind.told for kind in allowed))

    @wraps(method)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check(args, kwargs)
        return method(*args, **kwargs)

    @wraps(method)
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        check(args, kwargs)
        return await method(*args, **kwargs)

    return awaited if inspect.iscoroutinefunction(method) else checked  # frameworks ask which of the two it is


def _heads(annotation: Any) -> Iterator[str]:
    """The outermost types that the text of an annotation names: `float | None` has two, `Iterable[str]` has one."""
    if not isinstance(annotation, str):
        return
    left = [ast.parse(annotation, mode="eval").body]
    while left:
        node = left.pop(0)
        if isinstance(node, ast.BinOp):
            left[:0] = [node.left, node.right]
        else:
            yield ast.unparse(node.value if isinstance(node, ast.Subscript) else node)
