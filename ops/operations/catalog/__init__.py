"""The operations. A file that is put here is found without further registration."""

from .operation import Check, Context, Operation, checked, operation, operations

__all__ = ["Check", "Context", "Operation", "checked", "operation", "operations"]
