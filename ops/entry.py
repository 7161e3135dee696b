"""The `rolloutmq` command. A bare producer install lacks its libraries: the command says which."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line."""
    try:
        from .cli import app  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name in {"typer", "rich", "click"}:
            sys.exit(f"the rolloutmq command needs {error.name}: pip install 'rolloutmq[cli]'")
        raise
    app()


if __name__ == "__main__":
    main()
