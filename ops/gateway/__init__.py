"""`rolloutmq gateway`: a pool over HTTP, for clients of OpenAI's API. It keeps no state but Redis'."""

from .answers import Answer
from .guard import Guard
from .heir import Gateways
from .protocol import HttpLimits
from .quotas import Admission, Quotas
from .refused import Refused, refusal
from .requests import KeyReused, Request, RequestLost, Requests
from .server import HttpServer, Tls
from .tenants import Tenant, Tenants, new_key

__all__ = [
    "Admission",
    "Answer",
    "Gateways",
    "Guard",
    "HttpLimits",
    "HttpServer",
    "KeyReused",
    "Quotas",
    "Refused",
    "Request",
    "RequestLost",
    "Requests",
    "Tenant",
    "Tenants",
    "Tls",
    "new_key",
    "refusal",
]
