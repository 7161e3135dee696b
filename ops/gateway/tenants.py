"""Who may use the gateway: a file of tenants, with the SHA-256 of their keys, their rates and budgets."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
import time
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from ...messages import ConfigError
from ..http import Refused

log = logging.getLogger(__name__)
LOOK_S = 1.0
"""The file is looked at again after so many seconds, if there are requests."""
MAX_FILE_BYTES = 1 << 20

Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
Limit = Annotated[int, Field(strict=True, ge=1, le=10**12)]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    keys: tuple[Digest, ...] = Field(default=(), repr=False)
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    tokens_per_day: Limit | None = None
    max_running: Limit | None = None
    priority: Literal["high", "normal", "low"] | None = None
    pool: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] | None = None
    weights_from: Path | None = None


class Tenant(_Entry):
    """One tenant. A limit that is None is no limit; all of them hold over all gateways of the pool.

    tokens_per_minute, tokens_per_day: of prompts and answers; a day begins at 00:00 UTC.
    max_running: requests at the same time.
    priority: what its jobs have, whatever they ask for; None: what they ask for.
    pool: its own. weights_from: the folder below which its weights are; None for the gateway's.
    """

    name: str = "default"


class _File(BaseModel):
    model_config = _Entry.model_config

    tenants: dict[Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")], _Entry] = {}


def new_key() -> tuple[str, str]:
    """A new key, of 256 random bits, and its line for the file: "sha256:<hex>"."""
    key = f"rmq-{secrets.token_urlsafe(32)}"
    return key, f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


class Tenants:
    """The tenants of one file, which is read again when it changes. A file that is then wrong is logged and ignored.

    Without a file there is one tenant, "default", who needs no key. keyless: the tenant that sends none.
    """

    def __init__(self, path: Path | None, keyless: str | None = None) -> None:
        self._path, self._keyless, self._look_at = path, keyless, time.monotonic() + LOOK_S
        self._seen = _mark(path) if path else None
        self._tenants = _read(path) if path else (Tenant(),)
        if path is not None and keyless is not None and self._named(keyless) is None:
            raise ConfigError(f"file of keys {path}: it has no tenant {keyless}")

    @classmethod
    def load(cls, path: str | Path | None, keyless: str | None = None) -> Tenants:
        """Raises ConfigError, which names the file and what is wrong with it, and never quotes a key."""
        return cls(Path(path) if path is not None else None, keyless)

    @property
    def all(self) -> tuple[Tenant, ...]:
        """Those of the file as it was last read."""
        return self._tenants

    def _named(self, name: str | None) -> Tenant | None:
        return next((one for one in self._tenants if one.name == name), None)

    def of(self, headers: Iterable[tuple[bytes, bytes]]) -> Tenant:
        """Who sent these headers (as ASGI gives them), by `Authorization: Bearer` or `X-API-Key`.

        Raises Refused (401).
        """
        if self._path is None:
            return self._tenants[0]
        self._look_again(self._path)
        named = dict(reversed([*headers]))
        scheme, _, key = named.get(b"authorization", b"").partition(b" ")
        given = key.strip() if scheme.lower() == b"bearer" else named.get(b"x-api-key", b"").strip()
        digest = f"sha256:{hashlib.sha256(given).hexdigest()}"
        known = [(one, tenant) for tenant in self._tenants for one in tenant.keys]
        # Each of them is compared: how long that takes says nothing.
        found = [tenant for one, tenant in known if given and hmac.compare_digest(one, digest)]
        if not given and (keyless := self._named(self._keyless)) is not None:
            return keyless
        if not found:
            text = "This API key is not known here." if given else "No API key: send `Authorization: Bearer KEY`."
            raise Refused(401, "invalid_api_key", text)
        return found[0]

    def _look_again(self, path: Path) -> None:
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + LOOK_S
        before, self._seen = self._seen, _mark(path)
        if self._seen != before:
            try:
                self._tenants = _read(path)
                log.info("%s was read again: %d tenants", path, len(self._tenants))
            except ConfigError as error:
                log.error("the old keys stay: %s", error)


def _mark(path: Path) -> tuple[int, ...]:
    """Changes with the file."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_ino, found.st_size, found.st_mode


def _read(path: Path) -> tuple[Tenant, ...]:
    """Raises ConfigError. Parsers' own texts may quote what stands there, and that may be a key."""
    try:
        return _checked(path)
    except OSError as error:
        why = error.strerror or str(error)
    except ConfigError as error:
        why = str(error)
    except ValidationError as error:
        first = error.errors(include_input=False, include_context=False)[0]
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except (ValueError, RecursionError) as error:
        found = re.search(r"line \d+(, column \d+)?", str(error))
        why = f"it is no TOML ({found[0] if found else 'not readable'})"
    raise ConfigError(f"file of keys {path}: {why}")


def _checked(path: Path) -> tuple[Tenant, ...]:
    with path.open("rb") as file:
        mode, data = stat.S_IMODE(os.fstat(file.fileno()).st_mode), file.read(MAX_FILE_BYTES + 1)
    if mode & 0o037:
        allowed = "Only its owner may write it, and others than its group may not read it"
        raise ConfigError(f"its mode is {mode:04o}. {allowed}: chmod 640 {path} (defaultMode: 0440 for a Secret)")
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"it has {MAX_FILE_BYTES} bytes at most")
    told = _File.model_validate(tomllib.loads(data.decode()))
    tenants = [Tenant(name=name, **entry.model_dump()) for name, entry in told.tenants.items()]
    digests = [digest for tenant in tenants for digest in tenant.keys]
    if not digests:
        raise ConfigError("it has no key, so nobody could be served")
    if len({*digests}) < len(digests):
        raise ConfigError("a key is there more than once")
    return tuple(tenants)
