"""The command line: one function per command."""

from .main import app

__all__ = ["app"]
