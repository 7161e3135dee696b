"""Packages that import what they offer when it is used: `import rolloutmq` is quick, and nobody loads torch unasked."""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any


def lazy(package: str, names: Sequence[str], *modules: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package (PEP 562), whose `names` are looked for in `modules` in turn.

    modules: relative to the package, those that load least first. For type checkers the package imports the same names
    under TYPE_CHECKING.
    """

    def find(name: str) -> Any:
        if name in names:
            for module in modules:
                if (found := getattr(import_module(module, package), name, None)) is not None:
                    return found
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find, lambda: sorted(names)
