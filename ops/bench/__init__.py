"""Benchmarks. Each prints what it does, and ends with one line of JSON.

Few files: the larger benchmarks have rooms of their own.
"""

__all__ = []
