"""The operations. A file that is put here is found without further registration."""

from .operation import Check, Context, NoParams, Operation, Params, checked, operation, operations

__all__ = ["Check", "Context", "NoParams", "Operation", "Params", "checked", "operation", "operations"]
