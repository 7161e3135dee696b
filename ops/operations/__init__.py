"""Long operator work: operations run as RQ jobs, or here and now. Each is a file in catalog/ (docs/operations.md)."""

__all__ = []
