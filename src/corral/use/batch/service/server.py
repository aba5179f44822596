"""OpenAI's batch API over HTTP (`/v1/files`, `/v1/batches`), in front of the same runner.

The official `openai` SDK works against it unchanged. Every path except `/health` needs the key. One event loop serves
all connections (uvicorn); the batches themselves run in threads of their own (`workers`).
"""

from __future__ import annotations

import json
import os
import signal
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from corral.base.home import home_dir
from corral.client.endpoint import Endpoint
from corral.serve.asgi_server import Hosted
from corral.use.batch.core.folder import BatchLock
from corral.use.batch.core.runner import RunnerSettings
from corral.use.batch.service.app import make_app
from corral.use.batch.service.store import Store
from corral.use.batch.service.workers import Workers
from corral.use.batch.serving import BatchServers

ENDING_S = 5  # for answers under way when the service ends


@dataclass(frozen=True)
class ServiceOptions:
    """Everything that can be set."""

    folder: Path | None = None  # default: `batches` in Corral's home
    where: BatchServers = field(default_factory=BatchServers)
    key_file: str | None = None
    bind: str = "127.0.0.1"
    port: int = 8100
    jobs: int = 2
    any_model: bool = False
    as_json: bool = False
    largest_upload_bytes: int = 64 << 30
    settings: RunnerSettings = field(
        default_factory=lambda: RunnerSettings(wait=True)
    )  # for whoever starts the model again


class BatchService:
    """The service in a thread of its own: `with BatchService(options) as service: service.url`."""

    def __init__(self, options: ServiceOptions) -> None:
        self.options = options
        self.store = Store(options.folder or home_dir() / "batches")
        self.key_file = options.key_file or str(self.store.own_key())
        self._lock = BatchLock(self.store.folder / "lock", f"the folder {self.store.folder}")

    def __enter__(self) -> Self:
        key = Endpoint("http://127.0.0.1", "", self.key_file).key() or ""
        self._lock.__enter__()
        try:
            self._hosted = Hosted(self.options.bind, self.options.port, "corral-batch-api", ENDING_S)
            self.store.drop_broken_uploads()
        except BaseException:
            self._lock.__exit__(None, None, None)
            raise
        options = self.options
        self.workers = Workers(self.store, options.where, options.jobs, options.any_model, options.settings)
        app = make_app(self.store, self.workers, key, options.largest_upload_bytes)
        self._hosted.start(app)
        return self

    def __exit__(self, *_: object) -> None:
        self._hosted.close()
        self.workers.close()
        self._lock.__exit__(None, None, None)

    @property
    def url(self) -> str:
        host = f"[{self.options.bind}]" if ":" in self.options.bind else self.options.bind
        return f"http://{host}:{self._hosted.port}"

    def touch(self) -> None:
        self._lock.touch()


def serve_forever(options: ServiceOptions) -> int:
    """Serve until SIGTERM or Ctrl-C; batches under way continue at the next start."""
    ended = threading.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: ended.set())
    with BatchService(options) as service:
        about = {"url": service.url, "pid": os.getpid(), "key_file": service.key_file}
        if options.as_json:
            text = json.dumps(about)
        else:
            text = f"batch API on {service.url}/v1\n  key      {service.key_file}\n  folder   {service.store.folder}"
        print(text, flush=True)  # noqa: T201
        while not ended.wait(5):
            service.touch()
    return 0
