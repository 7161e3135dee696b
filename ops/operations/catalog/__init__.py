"""The operations. A file that is put here is found without further registration."""

from .operation import Context, NoParams, Operation, Params, checked, operation, operations

__all__ = ["Context", "NoParams", "Operation", "Params", "checked", "operation", "operations"]
