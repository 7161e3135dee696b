"""Broken input for everything that decodes what is in Redis: `python -m fuzz`, and a few seconds of it in the tests."""
