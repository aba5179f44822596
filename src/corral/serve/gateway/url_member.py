"""A server behind a gateway that Corral did not start: its address, its key, and the models that its user names.

Nothing that the server says gives it requests: its own list of models is not read for that. It gets only requests for
inference, because its key, with which they are sent, may be good for more: files, other models, an account.
"""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

from corral.base.errors import UsageError
from corral.base.record import nearest
from corral.client.endpoint import Endpoint

INFERENCE = frozenset(
    (b"/v1/completions", b"/v1/chat/completions", b"/v1/responses", b"/v1/messages", b"/v1/messages/count_tokens",
     b"/v1/embeddings", b"/v1/moderations", b"/v1/rerank", b"/v1/score", b"/v1/images/generations",
     b"/v1/audio/speech", b"/v1/audio/transcriptions", b"/v1/audio/translations", b"/tokenize", b"/detokenize",
     b"/pooling", b"/classify", b"/score", b"/rerank")
)  # fmt: skip
FORM = "URL,model=NAME,…[,key-file=PATH]"
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


@dataclass(frozen=True)
class UrlMember:
    """What its user says of it."""

    endpoint: Endpoint  # its model: the first that is named
    models: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.endpoint.root

    @classmethod
    def parse(cls, text: str) -> UrlMember:
        """Read `URL,model=NAME,model=NAME,key-file=PATH`; a name or path may contain commas."""
        url, *given = re.split(r",(?=[a-z-]+=)", text)
        pairs = [one.partition("=")[::2] for one in given]
        for name, value in pairs:
            if name not in ("model", "key-file") or not value:
                known = nearest(name, ("model", "key-file")) or ["model", "key-file"]
                raise UsageError(f"--member {text!r}: {name}={value} is not known.", f"Write {known[0]}=….")
        models = tuple(dict.fromkeys(value for name, value in pairs if name == "model"))
        key_files = [value for name, value in pairs if name == "key-file"]
        if not models:
            raise UsageError(
                f"--member {text!r} names no model: a server at a URL gets requests for the models that you name,"
                " not for those that it lists.",
                f"Write --member {url},model=NAME, once for each model.",
            )
        if len(key_files) > 1:
            raise UsageError(f"--member {text!r} names two key files.", "Give one.")
        if not url.isascii() or not url.isprintable() or re.search(r"[\s?#]", url) or not _has_port(url):
            raise UsageError(
                f"{url!r} is not the address of a server.", "Give http://HOST:PORT or https://HOST/PATH."
            )
        member = cls(Endpoint(url, models[0], *key_files), models)
        member.endpoint.key()  # refuses a file that others can read
        return member


def _has_port(url: str) -> bool:
    try:
        return urlsplit(url).port != 0
    except ValueError:
        return False


def tls_of(url: str) -> ssl.SSLContext | None:
    return ssl.create_default_context() if url.startswith("https:") else None


def with_one_model(body: bytes | bytearray, model: str) -> bytes:
    """A JSON body that names this model and, whichever way it is read, no other.

    Of two fields of one name some parsers take the first; some take `Model` for `model`.
    """
    fields: dict[str, Any] = {name: value for name, value in _fields(body).items() if name.lower() != "model"}
    return msgspec.json.encode({"model": model, **fields})
