"""`rolloutmq gateway`: HTTP in front of a pool. It keeps no state but Redis'."""

from .answers import Answer
from .heir import Gateways
from .requests import KeyReused, Request, RequestLost, Requests

__all__ = ["Answer", "Gateways", "KeyReused", "Request", "RequestLost", "Requests"]
