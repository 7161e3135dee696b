"""The operations. Adding one is adding a file here: it is found by itself."""

from .operation import Context, NoParams, Operation, Params, operation
from .registry import checked, operations

__all__ = ["Context", "NoParams", "Operation", "Params", "checked", "operation", "operations"]
