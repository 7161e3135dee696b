"""A file is one concept, so none is long."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ["messages", "sync", "producer", "worker", "ops", "tests", "tools", "benchmarks", "examples"]
LIMIT = 400


def test_no_file_is_longer_than_the_limit() -> None:
    files = [ROOT / "__init__.py"]
    files += [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".lua"}]
    sizes = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert len(sizes) > 10
    assert {name: size for name, size in sizes.items() if size > LIMIT} == {}
