"""`rolloutmq gateway`: a pool over HTTP, for clients of OpenAI's API."""

from .guard import Guard
from .protocol import HttpLimits
from .quotas import Admission, Quotas
from .refused import Refused, refusal
from .server import HttpServer, Tls
from .tenants import Tenant, Tenants, new_key

__all__ = [
    "Admission",
    "Guard",
    "HttpLimits",
    "HttpServer",
    "Quotas",
    "Refused",
    "Tenant",
    "Tenants",
    "Tls",
    "new_key",
    "refusal",
]
