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
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from ...messages import ConfigError
from .http import Refused

log = logging.getLogger(__name__)
LOOK_S = 1.0
"""The file is looked at again after so many seconds, if there are requests."""
MAX_FILE_BYTES = 1 << 20
MAX_KEY_BYTES = 512
Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
Limit = Annotated[int, Field(strict=True, ge=1, le=10**12)]
Headers = Iterable[tuple[bytes, bytes]]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    keys: tuple[Digest, ...] = Field(default=(), repr=False)
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    tokens_per_day: Limit | None = None
    max_running: Limit | None = None
    priority: Literal["high", "normal", "low"] | None = None


class Tenant(_Entry):
    """One tenant. A limit that is None is no limit; all of them hold over all gateways of the pool.

    tokens_per_minute, tokens_per_day: of prompts and answers; a day begins at 00:00 UTC.
    max_running: requests at the same time.
    priority: what its jobs have, whatever they ask for; None: what they ask for.
    admin: it may change the pool.
    """

    name: str = "default"
    admin: bool = False


class _File(BaseModel):
    model_config = _Entry.model_config

    admin: tuple[Digest, ...] = ()
    tenants: dict[Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")], _Entry] = {}


def new_key() -> tuple[str, str]:
    """A new key, of 256 random bits, and its line for the file: "sha256:<hex>"."""
    key = f"rmq-{secrets.token_urlsafe(32)}"
    return key, f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


class Tenants:
    """The tenants of one file, which is read again when it changes. A file that is then wrong is logged and ignored.

    Without a file there is one tenant, "default", who needs no key and may not change the pool.
    """

    def __init__(self, path: Path | None, tenants: Iterable[Tenant]) -> None:
        self._path = path
        self._tenants = tuple(tenants)
        self._seen = _mark(path) if path else None
        self._look_at = time.monotonic() + LOOK_S

    @classmethod
    def load(cls, path: str | Path | None) -> Tenants:
        """Raises ConfigError, which names the file and what is wrong with it, and never quotes a key."""
        if path is None:
            return cls(None, (Tenant(),))
        return cls(Path(path), _read(Path(path)))

    def of(self, headers: Headers) -> Tenant:
        """Who sent these headers (as ASGI gives them), by `Authorization: Bearer` or `X-API-Key`.

        Raises Refused (401).
        """
        self._look_again()
        if self._path is None:
            return self._tenants[0]
        named = dict(reversed([*headers]))
        scheme, _, key = named.get(b"authorization", b"").partition(b" ")
        given = key.strip() if scheme.lower() == b"bearer" else named.get(b"x-api-key", b"").strip()
        if not given:
            text = "No API key: send it as `Authorization: Bearer KEY`, or as `X-API-Key: KEY`."
            raise Refused(401, "invalid_api_key", text)
        digest = "sha256:" + hashlib.sha256(given[: MAX_KEY_BYTES + 1]).hexdigest()
        found = None
        for tenant in self._tenants:  # all of them: how long it takes says nothing
            for known in tenant.keys:
                if hmac.compare_digest(known, digest):
                    found = tenant
        if found is None:
            raise Refused(401, "invalid_api_key", "This API key is not known here.")
        return found

    def admin(self, headers: Headers) -> Tenant:
        """Who sent these headers, if that is an admin. Raises Refused (401, 403)."""
        tenant = self.of(headers)
        if not tenant.admin:
            text = "This changes the pool, and needs a key of `admin` in the gateway's file of keys."
            raise Refused(403, "admin_only", text)
        return tenant

    def _look_again(self) -> None:
        if self._path is None or time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + LOOK_S
        mark = _mark(self._path)
        if mark == self._seen:
            return
        self._seen = mark
        try:
            self._tenants = tuple(_read(self._path))
        except ConfigError as error:
            log.error("the old keys stay: %s", error)
        else:
            log.info("%s was read again: %d tenants", self._path, len(self._tenants))


def _mark(path: Path) -> tuple[int, ...] | None:
    """Changes with the file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size, found.st_mode


def _read(path: Path) -> Iterable[Tenant]:
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"file of keys {path}: {error.strerror or error}") from None
    if mode & 0o037:
        raise ConfigError(
            f"file of keys {path}: its mode is {mode:04o}. Only its owner may write it, and others than its group may "
            f"not read it: chmod 640 {path} (defaultMode: 0440 for a Secret)"
        )
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"file of keys {path}: more than {MAX_FILE_BYTES} bytes")
    try:
        told = _File.model_validate(_parsed(path, data))
    except ValidationError as error:
        # Not its own text: that may quote what stands there, and that may be a key.
        first = error.errors(include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"file of keys {path}: {where}: {first['msg']}") from None
    tenants = [Tenant(name=name, **entry.model_dump()) for name, entry in told.tenants.items()]
    if told.admin:
        tenants.append(Tenant(name="admin", keys=told.admin, admin=True))
    digests = [digest for tenant in tenants for digest in tenant.keys]
    if not digests or len({*digests}) < len(digests) or len({it.name for it in tenants}) < len(tenants):
        why = (
            "a key or the name `admin` is there more than once" if digests else "it has no key: nobody could be served"
        )
        raise ConfigError(f"file of keys {path}: {why}")
    return tuple(tenants)


def _parsed(path: Path, data: bytes) -> Any:
    if path.suffix not in {".toml", ".yaml", ".yml"}:
        raise ConfigError(f"file of keys {path}: its name must end with .toml, .yaml or .yml")
    kind = path.suffix[1:].upper()
    try:
        if kind == "TOML":
            return tomllib.loads(data.decode())
        import yaml  # noqa: PLC0415 – TOML works without

        try:
            return yaml.safe_load(data.decode()) or {}
        except (yaml.YAMLError, RecursionError) as error:
            raise ValueError(str(error)) from None
    except ValueError as error:  # UnicodeDecodeError and TOMLDecodeError are, too
        found = re.search(r"line \d+(, column \d+)?", str(error))  # the rest of its text may quote a key
        raise ConfigError(f"file of keys {path}: it is no {kind} ({found[0] if found else 'not readable'})") from None
