"""The checkout is the package: what lies beside it must not be imported."""

from __future__ import annotations

import sys
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]


def test_the_folder_around_the_checkout_is_not_searched_for_modules() -> None:
    """pytest puts it there if it imports the checkout's `__init__.py`. A folder `sglang` in it would be SGLang."""
    assert CHECKOUT.parent not in [Path(entry).resolve() for entry in sys.path]
