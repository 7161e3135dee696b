"""What a command line knows before it connects. Nothing is imported here, so help and completion are quick."""

DEFAULT_URL = "redis://127.0.0.1:6379/0"
"""The pool's Redis, where no other one is named."""
