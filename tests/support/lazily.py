"""Modules that take seconds to import, for tests of which few processes run any: every process imports every test."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class Lazily:
    """The public names of a module, which is imported when the first of them is used."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest asks everything whether it is a test, a fixture or a mock
            raise AttributeError(name)
        return getattr(import_module(self._module), name)
