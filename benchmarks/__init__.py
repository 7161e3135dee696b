"""What the figures of README.md and of docs/ are made with; README.md here says how. Not part of the package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rolloutmq.ops.files import writing


def write_json(option: str, path: Path, value: Any) -> None:
    """Write a value, indented, into a file; folders on the way to it are made. Raises InvalidField."""
    with writing(option, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value, indent=2) + "\n")
