"""HTTP for an ASGI application: limits of what clients send and how slowly, TLS, a drain, errors as answers."""

from .guard import Guard
from .protocol import HttpLimits
from .refused import Refused, error_handlers, refused_of
from .server import HttpServer, Tls

__all__ = ["Guard", "HttpLimits", "HttpServer", "Refused", "Tls", "error_handlers", "refused_of"]
