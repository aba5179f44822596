"""A stand-in for `vllm serve` in tests of the agent: it speaks the engine's log lines and a little HTTP.

    stub_engine.py PORT KEY_FILE [OPTION...]
    stub_engine.py -m vllm... serve MODEL … --port PORT …   # as Corral calls a real one; options in STUB_OPTIONS

Options: `die-after-ready=CODE`, `exit=CODE` (before ready), `silent` (no more lines, no CPU), `daemon` (leaves a
child in a session of its own), `retitled` (a child without the launch's environment), `open` (answers without a key),
`hang` (stops answering after ready), `slow=SECONDS` or `after=FILE` (before the port is bound), `worker-exit=CODE`
(a headless rank), `busy` (says that a request runs), `spin` (computes and writes lines, and never gets on),
`pause=SECONDS` (before each answer). After SIGUSR1 it looks well and gets nowhere: completions are taken and never
answered, and counted as running. After SIGUSR2 it ends with code 0, as vLLM does when its engine has died.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

LINES = [
    "INFO 11-15 non-default args: {'model': 'm'}",
    "INFO 11-15 [gpu_model_runner.py:1] Starting to load model m...",
    "\rLoading safetensors checkpoint shards:  50% Completed | 1/2 [00:01<00:01,  1.0s/it]",
    "\rLoading safetensors checkpoint shards: 100% Completed | 2/2 [00:02<00:00,  1.0s/it]",
    "INFO Loading weights took 2.00 seconds",
    "INFO Model loading took 14.99 GiB memory and 2.50 seconds",
    "INFO torch.compile took 12.34 s in total",
    "INFO Available KV cache memory: 111.61 GiB",
    "INFO GPU KV cache size: 914,304 tokens, Maximum concurrency for 8,192 tokens per request: 111.61x",
    "INFO Graph capturing finished in 5 secs, took 0.99 GiB",
    "INFO init engine (profile, create kv cache, warmup model) took 20.00 s",
    "INFO Starting vLLM server on http://127.0.0.1",
]
MEASURED = """{"threads": 2, "read_gb_s": 20.0, "python_s": 0.0024, "busy": 0.0, "formats": [
  {"format": "bf16", "kernel": "onednn", "rows": [1, 4, 32, 512], "gflops": [18.0, 70.0, 400.0, 1000.0]},
  {"format": "fp32", "kernel": "onednn", "rows": [1, 4, 32, 512], "gflops": [9.0, 36.0, 150.0, 230.0]}]}""".replace(
    "\n", ""
)
ANSWER = """{"id": "1", "object": "chat.completion", "created": 1, "model": "m",
  "choices": [{"index": 0, "message": {"role": "assistant", "content": "Paris."}, "finish_reason": "stop"}],
  "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}}"""


def main() -> None:
    words = sys.argv[1:]
    if words[0] == "-c":  # asked for its version; a host's own /run may say another
        own = Path("/run/stub_version")
        print(own.read_text() if own.exists() else "0.32.0")
        return
    if words[:2] == ["-m", "corral_cpu_engine.measure"]:  # how quick this CPU is: an AMX machine's answer
        kind = os.environ.get("STUB_MEASURED", "")
        if kind == "broken":
            sys.exit("ImportError: no torch")
        print(MEASURED.replace("9.0, 36.0, 150.0, 230.0", "0.5, 0.5, 0.5, 0.5") if kind else MEASURED)
        return
    signal.signal(signal.SIGUSR2, lambda *_: os._exit(0))
    if "--headless" in words:  # a rank without a server
        for line in LINES[:6]:
            print(line, flush=True)
        options = dict(option.partition("=")[::2] for option in os.environ.get("STUB_OPTIONS", "").split())
        if "worker-exit" in options:
            time.sleep(1)
            print("ValueError: something the engine did not like", flush=True)
            sys.exit(int(options["worker-exit"]))
        time.sleep(1000)
    named = [word.partition("=")[2] for word in words if word.startswith("--served-model-name=")]
    if "--served-model-name" in words:  # several
        named = [words[words.index("--served-model-name") + 1]]
    model = named[0] if named else "m"
    if words[0] == "-m":
        port, key_file = int(words[words.index("--port") + 1]), Path(os.environ["CORRAL_KEY_FILE"])
        host = words[words.index("--host") + 1] if "--host" in words else "127.0.0.1"
        words = os.environ.get("STUB_OPTIONS", "").split()
    else:
        port, key_file, words = int(words[0]), Path(words[1]), words[2:]
        host = "127.0.0.1"
    options = dict(option.partition("=")[::2] for option in words)
    key = key_file.read_text().strip()
    if caches := os.environ.get("VLLM_CACHE_ROOT"):
        Path(caches).mkdir(parents=True, exist_ok=True)
    if "retitled" in options:  # a child whose environment no longer shows where it belongs
        child = subprocess.Popen(["/bin/sleep", "1000"], env={})
        Path("child").write_text(str(child.pid))
    if "daemon" in options:
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    for line in LINES:
        print(line, flush=True)
    if "exit" in options:
        print("ValueError: something the engine did not like", flush=True)
        sys.exit(int(options["exit"]))
    if "silent" in options:
        time.sleep(1000)
    while "spin" in options:  # computes and talks, and gets nowhere
        print(
            "WARNING 11-15 10:00:00 [cpu.py:1] Failed to create oneDNN linear, fallback to torch linear", flush=True
        )
        sum(range(200_000))
    hanging, stuck, taken = threading.Event(), threading.Event(), threading.Semaphore(0)
    signal.signal(signal.SIGUSR1, lambda *_: stuck.set())

    class Handler(BaseHTTPRequestHandler):
        def answer(self, code: int, text: str) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def do_GET(self) -> None:
            if hanging.is_set():
                time.sleep(1000)
            if self.path == "/health":
                return self.answer(200, "")
            if "open" not in options and self.headers.get("Authorization") != f"Bearer {key}":
                return self.answer(401, "")
            if self.path == "/metrics":
                busy = int("busy" in options) + taken._value
                return self.answer(
                    200, f'vllm:num_requests_running{{a="b"}} {busy}\nvllm:generation_tokens_total 1\n'
                )
            if self.path == "/v1/models":
                return self.answer(200, json.dumps({"object": "list", "data": [{"id": model, "object": "model"}]}))
            return self.answer(200, "{}")

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            wrong = "only" in options and self.path != options["only"]
            if wrong or (self.path == "/v1/audio/transcriptions" and b"WAVEfmt" not in body):
                self.answer(404, '{"detail":"Not Found"}')
                return
            if stuck.is_set():
                taken.release()  # one more
                time.sleep(1000)
            time.sleep(float(options.get("pause", 0)))
            self.answer(200, ANSWER)
            if "die-after-ready" in options:
                threading.Timer(0.3, os._exit, [int(options["die-after-ready"])]).start()
            if "hang" in options:
                hanging.set()

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        allow_reuse_port = True  # so that a rival in a test can take the port as well

    time.sleep(float(options.get("slow", 0)))
    while "after" in options and not Path(options["after"]).exists():
        time.sleep(0.02)

    Server((host, port), Handler).serve_forever()


if __name__ == "__main__":
    main()
