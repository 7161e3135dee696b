"""The operations. Every module here is found by itself: adding an operation is adding a file."""

__all__ = []
