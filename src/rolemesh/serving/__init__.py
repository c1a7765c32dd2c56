"""An OpenAI-compatible HTTP endpoint over whatever answers single requests (`protocols/requests.py`). See docs/serving.md."""

from rolemesh.serving.connections import check_address
from rolemesh.serving.server import Served, Server

__all__ = ["Served", "Server", "check_address"]
