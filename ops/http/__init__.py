"""HTTP for an ASGI application: limits of what clients send and how slowly, TLS, a drain, errors as answers."""

from .guard import Guard
from .protocol import HttpLimits
from .refused import Refused, refusal
from .server import HttpServer, Tls

__all__ = ["Guard", "HttpLimits", "HttpServer", "Refused", "Tls", "refusal"]
