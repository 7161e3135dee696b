"""Triton's kernels without a GPU: their logic, and not their speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest


def interpreted(code: str) -> Any:
    """What `code` prints as JSON, run by itself under Triton's interpreter."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)
