"""Where a server listens, as a URL."""

from __future__ import annotations


def http_url(host: str, port: int) -> str:
    """`http://127.0.0.1:8000`; an IPv6 address is put in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
