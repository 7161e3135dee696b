"""The command line: one function per command.

Many files: one for each kind of command, and what they share.
"""

from .main import app

__all__ = ["app"]
