"""The example in docs/operations.md is an operation, and a file with it is all that is needed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from rolloutmq.ops.operations import catalog

ROOT = Path(__file__).parents[3]


def test_the_example_is_one_file_and_runs(redis_db: str, tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "operations.md").read_text(), re.DOTALL)
    (tmp_path / "dead_forget.py").write_text(example)
    # In the catalog's folder as far as Python is concerned, without writing into the source tree.
    code = (
        f"import sys; from {catalog.__name__} import __path__ as path; path.append({str(tmp_path)!r})\n"
        "from rolloutmq.ops.entry import main; main()"
    )
    command = ["ops", "run", "dead-forget", "--here", "--param", "cause=refused", "--redis", redis_db]
    done = subprocess.run(
        [sys.executable, "-c", code, *command], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, '{"dropped": 0}'), done.stderr
