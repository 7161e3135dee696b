"""`rolloutmq gateway`: pools over HTTP, for clients of OpenAI's API and for trainers. It keeps no state but Redis'.

Many files: each is one promise (keys, heirs, pauses, quotas, tenants, versions) or one layer of a request.
"""

from ..http import HttpLimits, HttpServer, Tls
from .app import application
from .gateway import Gateway
from .settings import Settings
from .tenants import new_key

__all__ = ["Gateway", "HttpLimits", "HttpServer", "Settings", "Tls", "application", "new_key"]
