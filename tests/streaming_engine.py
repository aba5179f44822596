"""A stand-in for `vllm serve` that streams paced tokens behind the deployment's real guard; standard library only.

It speaks the engine's log lines, then HTTP/1.1 with keep-alive. `STREAM_TOKENS` and `STREAM_ITL_MS` in its
environment set how long an answer is; `LOAD_S` how long it takes to be ready, `WHOLE_S` how long an answer that is
not streamed takes. A prompt with "refuse" in it is answered with 400, one with "die" ends the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import sys
import time
from typing import Any

LINES = (
    "INFO non-default args: {'model': 'm'}",
    "INFO Starting to load model m...",
    "\rLoading safetensors checkpoint shards: 100% Completed | 2/2 [00:02<00:00,  1.0s/it]",
    "INFO Loading weights took 2.00 seconds",
)
TOKENS = int(os.environ.get("STREAM_TOKENS", "40"))
ITL_S = float(os.environ.get("STREAM_ITL_MS", "25")) / 1000
WHOLE_S = float(os.environ.get("WHOLE_S", "0"))
running = 0
generated = 0


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    global running, generated
    if scope["type"] == "lifespan":
        await asyncio.Event().wait()
    path = scope["path"]
    if path == "/metrics":
        await answer(
            send, f'vllm:num_requests_running{{a="b"}} {running}\nvllm:generation_tokens_total {generated}\n'
        )
    elif path.endswith("/completions"):
        asked = json.loads((await receive())["body"])
        running += 1
        try:
            await complete(asked, send)
        finally:
            running -= 1
    elif path == "/v1/models":
        names = [word.partition("=")[2] for word in sys.argv if word.startswith("--served-model-name=")]
        await answer(send, json.dumps({"data": [{"id": name, "max_model_len": 4096} for name in names or ["m"]]}))
    else:
        await answer(send, "{}")


async def complete(asked: dict[str, Any], send: Any) -> None:
    global generated
    count = min(TOKENS, int(asked.get("max_tokens") or TOKENS))
    prompt = str(asked.get("prompt", ""))
    if "die" in prompt:
        os._exit(1)
    if "refuse" in prompt:
        await answer(send, json.dumps({"error": {"message": "such words are refused", "code": 400}}), 400)
        return
    if not asked.get("stream"):
        await asyncio.sleep(WHOLE_S)
        generated += count
        choice = {"index": 0, "text": "Paris.", "message": {"role": "assistant", "content": "Paris."}}
        usage = {"prompt_tokens": 5, "completion_tokens": count, "total_tokens": 5 + count}
        body = {"id": "1", "object": "chat.completion", "created": 1, "model": asked.get("model", "m"),
                "choices": [{**choice, "finish_reason": "stop"}], "usage": usage}  # fmt: skip
        await answer(send, json.dumps(body))
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    for number in range(count):
        await asyncio.sleep(ITL_S)
        generated += 1
        finish = "stop" if number == count - 1 else None
        choice = {"index": 0, "delta": {"content": f"{number} "}, "finish_reason": finish}
        event = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
        text = f"data: {json.dumps(event)}\n\n".encode()
        await send({"type": "http.response.body", "body": text, "more_body": True})
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


async def answer(send: Any, text: str, status: int = 200) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": text.encode()})


async def serve_one(guarded: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The requests of one connection, one after the other."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            method, path, _ = head[0].split(" ")
            headers = [
                (n.strip().lower(), v.strip()) for n, _, v in (line.partition(":") for line in head[1:] if line)
            ]
            body = await reader.readexactly(int(dict(headers).get("content-length", 0)))
            scope = {"type": "http", "method": method, "path": path.partition("?")[0],
                     "headers": [(name.encode(), value.encode()) for name, value in headers]}  # fmt: skip

            async def receive(body: bytes = body) -> dict[str, Any]:
                return {"type": "http.request", "body": body}

            async def send(message: dict[str, Any]) -> None:
                if message["type"] == "http.response.start":
                    lines = [b"%b: %b\r\n" % pair for pair in message["headers"] if pair[0] != b"content-length"]
                    first = b"HTTP/1.1 %d X\r\n" % message["status"]
                    writer.write(first + b"".join(lines) + b"transfer-encoding: chunked\r\n\r\n")
                else:
                    part = message.get("body", b"")
                    writer.write(b"%x\r\n%b\r\n" % (len(part), part) if part else b"")
                    writer.write(b"" if message.get("more_body") else b"0\r\n\r\n")
                    await writer.drain()

            await guarded(scope, receive, send)
    writer.close()


async def main() -> None:
    words = sys.argv[1:]
    if words[0] == "-c":  # asked for its version
        print("0.32.0")
        return
    for line in LINES:
        print(line, flush=True)
    time.sleep(float(os.environ.get("LOAD_S", "1")))
    guarded = importlib.import_module("corral_guard").Guard(app)
    living = asyncio.ensure_future(guarded({"type": "lifespan", "app": None}, None, None))
    port = int(words[words.index("--port") + 1])
    server = await asyncio.start_server(lambda r, w: serve_one(guarded, r, w), "0.0.0.0", port)
    print("INFO Starting vLLM server on http://0.0.0.0", flush=True)
    await asyncio.gather(living, server.serve_forever())


if __name__ == "__main__":
    asyncio.run(main())
