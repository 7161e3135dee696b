"""A gateway's file of keys."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rolloutmq.ops.gateway import new_key


def keys_file(folder: Path, tenants: Mapping[str, str]) -> tuple[Path, dict[str, str]]:
    """A file with these tenants, each with further lines, and the key of each."""
    made = {name: new_key() for name in tenants}
    file = folder / "keys.toml"
    file.write_text(
        "".join(f"[tenants.{name}]\nkeys = ['{made[name][1]}']\n{more}\n" for name, more in tenants.items())
    )
    file.chmod(0o600)
    return file, {name: key for name, (key, _) in made.items()}


def bearer(key: str) -> dict[str, str]:
    """The headers that say a key."""
    return {"Authorization": f"Bearer {key}"}
