#!/usr/bin/env python3
"""Measure how fast a vLLM server starts and how fast it then decodes.

Standard library only; runs with any Python >= 3.9 and drives an engine Python
(the venv that holds vLLM) from outside.

    bench_start.py --python VENV/bin/python --model DIR --settings settings.json
                   [--only a,b] [--rounds 3] [--cold] [--work DIR] [--json out.json]

settings.json is a list (or a name -> object map) of

    {"name": "steady",
     "module": "vllm.entrypoints.openai.api_server",     # run as python -m MODULE
     "args": ["--max-model-len", "2048"],                # after --model DIR
     "env": {"VLLM_CACHE_ROOT": "{cache}/vllm"},         # null unsets a variable
     "python_args": ["-X", "frozen_modules=on"]}

`{cache}` is a folder of that setting alone (kept between rounds, emptied before
the cold start), `{model}` the model folder, `{venv}` the venv, `{site}` its
site-packages.

Every round runs all settings in turn (A, B, A, B, ...), so that noise from
other users of the machine hits all of them alike.  Per start:

  ready s   launch until the first real completion came back (one token)
  cpu s     user+sys of every process in the server's session, at that moment
  one       tok/s of one stream, 128 tokens, first token not counted
  many      output tok/s of 32 streams at once, 128 tokens in / 128 out each
"""

from __future__ import annotations

import argparse
import functools
import glob
import http.client
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

TICK = os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    """A TCP port of 127.0.0.1 that is free right now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def session_cpu(sid: int) -> tuple[float, int]:
    """CPU seconds (incl. reaped children) and process count of a session."""
    total, count = 0, 0
    for path in glob.glob("/proc/[0-9]*/stat"):
        try:
            with open(path) as f:
                rest = f.read().rpartition(")")[2].split()
        except OSError:
            continue
        if int(rest[3]) == sid:
            total += sum(int(x) for x in rest[11:15])
            count += 1
    return total / TICK, count


def session_rss(sid: int) -> float:
    """Proportional set size of a session in GiB (0 where the kernel hides it)."""
    kib = 0
    for path in glob.glob("/proc/[0-9]*/stat"):
        try:
            with open(path) as f:
                rest = f.read().rpartition(")")[2].split()
            if int(rest[3]) != sid:
                continue
            with open(os.path.dirname(path) + "/smaps_rollup") as f:
                kib += next(int(l.split()[1]) for l in f if l.startswith("Pss:"))
        except (OSError, StopIteration):
            continue
    return kib / 2**20


class Server:
    """One vLLM server in a session of its own."""

    def __init__(self, python: str, model: str, setting: dict[str, Any], cache: str, log: str):
        venv = os.path.dirname(os.path.dirname(os.path.abspath(python)))
        site = (glob.glob(os.path.join(venv, "lib", "python3*", "site-packages")) or [""])[0]

        def fill(text: str) -> str:
            for key, value in (("cache", cache), ("model", model), ("venv", venv), ("site", site)):
                text = text.replace("{%s}" % key, value)
            return text

        self.port = free_port()
        env = dict(os.environ, HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")
        for key, value in setting.get("env", {}).items():
            if value is None:
                env.pop(key, None)
            else:
                env[key] = fill(value)
        argv = [
            python,
            *setting.get("python_args", []),
            "-m",
            setting.get("module", "vllm.entrypoints.openai.api_server"),
            "--model",
            model,
            "--served-model-name",
            "m",
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            *[fill(a) for a in setting.get("args", [])],
        ]
        os.makedirs(cache, exist_ok=True)
        self.log = open(log, "wb")
        self.t0 = time.monotonic()
        self.proc = subprocess.Popen(
            argv, env=env, stdout=self.log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
        )

    def post(self, path: str, body: dict[str, Any], timeout: float = 600) -> http.client.HTTPResponse:
        conn = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        conn.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return conn.getresponse()

    def wait_ready(self, limit: float) -> tuple[float, float]:
        """Seconds and CPU seconds until the first real completion."""
        while time.monotonic() - self.t0 < limit:
            if self.proc.poll() is not None:
                raise RuntimeError(f"server exited with {self.proc.returncode}, see {self.log.name}")
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                r = self.post("/v1/completions", {"model": "m", "prompt": "Hello", "max_tokens": 1})
                if r.status == 200 and json.loads(r.read())["choices"]:
                    return time.monotonic() - self.t0, session_cpu(self.proc.pid)[0]
            except (OSError, http.client.HTTPException):
                pass
            time.sleep(0.1)
        raise RuntimeError(f"not ready after {limit} s, see {self.log.name}")

    def one_stream(self, tokens: int = 128) -> float:
        """Decode speed of a single stream, tok/s."""
        r = self.post(
            "/v1/completions",
            {
                "model": "m",
                "prompt": "Once upon a time there was",
                "max_tokens": tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            },
        )
        stamps = [time.monotonic() for line in r if line.startswith(b"data: {")]
        return (tokens - 1) / (stamps[-1] - stamps[0])

    def many_streams(self, n: int = 32, tokens: int = 128) -> float:
        """Output tok/s of n requests sent at once (fresh random prompts)."""
        rng = random.Random()
        bad: list[str] = []

        def call() -> None:
            ids = [rng.randrange(100, 40000) for _ in range(tokens)]
            try:
                body = json.loads(
                    self.post(
                        "/v1/completions",
                        {"model": "m", "prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True},
                    ).read()
                )
                if body["usage"]["completion_tokens"] != tokens:
                    bad.append("short answer")
            except Exception as e:
                bad.append(repr(e))

        threads = [threading.Thread(target=call) for _ in range(n)]
        t = time.monotonic()
        for th in threads:
            th.start()
        for th in threads:
            th.join()
        if bad:
            raise RuntimeError(f"{len(bad)} of {n} streams failed: {bad[0]}")
        return n * tokens / (time.monotonic() - t)

    def stop(self) -> float:
        """SIGTERM, then SIGKILL for the session's stragglers; seconds it took."""
        t = time.monotonic()
        self.proc.send_signal(signal.SIGTERM)
        try:
            self.proc.wait(30)
        except subprocess.TimeoutExpired:
            pass
        while session_cpu(self.proc.pid)[1] and time.monotonic() - t < 35:
            time.sleep(0.1)
        try:
            os.killpg(self.proc.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.proc.wait()
        self.log.close()
        return time.monotonic() - t


def measure(args: argparse.Namespace, setting: dict[str, Any], label: str, speed: bool) -> dict[str, Any]:
    """One start of one setting; `label` names the log file."""
    cache = os.path.join(args.work, "cache", setting["name"])
    log = os.path.join(args.work, f"{setting['name']}-{label}.log")
    server = Server(args.python, args.model, setting, cache, log)
    row: dict[str, Any] = {"name": setting["name"], "label": label}
    try:
        row["ready"], row["cpu"] = server.wait_ready(args.limit)
        row["pss"] = session_rss(server.proc.pid)
        if speed:
            server.one_stream(16)
            row["one"] = max(server.one_stream(args.tokens) for _ in range(2))
            server.many_streams(32, 8)
            row["many"] = max(server.many_streams(32, args.tokens) for _ in range(2))
    except Exception as e:
        row["error"] = str(e)
    finally:
        row["stop"] = server.stop()
    print(
        "  " + json.dumps({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}),
        file=sys.stderr,
        flush=True,
    )
    return row


def column(rows: list[dict[str, Any]], key: str) -> list[float]:
    return [row[key] for row in rows if key in row]


def table(rows: list[dict[str, Any]], names: list[str]) -> str:
    """Markdown: per setting the cold start and min/median of the warm ones."""

    def cell(values: list[float], best: Any = min, digits: int = 1) -> str:
        if not values:
            return "-"
        return f"{best(values):.{digits}f} / {statistics.median(values):.{digits}f}"

    out = [
        "| setting | cold s | warm s min/med | CPU s min/med | one tok/s max/med "
        "| 32 streams tok/s max/med | PSS GiB | stop s | n |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in names:
        mine = [r for r in rows if r["name"] == name]
        cold = [r["ready"] for r in mine if r["label"] == "cold" and "ready" in r]
        warm = [r for r in mine if r["label"] != "cold" and "ready" in r]
        col = functools.partial(column, warm)
        errors = sum("error" in r for r in mine)
        out.append(f"| {name} | {cold[0]:.1f} |" if cold else f"| {name} | - |")
        out[-1] += (
            f" {cell(col('ready'))} | {cell(col('cpu'))} | {cell(col('one'), max)} | {cell(col('many'), max, 0)}"
            f" | {max(col('pss'), default=0):.1f} | {max(col('stop'), default=0):.1f} | {len(warm)}"
            + (f", {errors} failed" if errors else "")
            + " |"
        )
    return "\n".join(out)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--python", required=True, help="Python of the venv that holds vLLM")
    p.add_argument("--model", required=True, help="model folder")
    p.add_argument("--settings", required=True, help="JSON file, or JSON text")
    p.add_argument("--only", help="comma-separated names")
    p.add_argument("--rounds", type=int, default=3, help="warm starts per setting")
    p.add_argument("--cold", action="store_true", help="first one start with an emptied {cache}")
    p.add_argument("--no-speed", action="store_true", help="start times only")
    p.add_argument("--tokens", type=int, default=128)
    p.add_argument("--limit", type=float, default=400, help="seconds to wait for a server")
    p.add_argument("--work", default="/tmp/bench_start", help="logs and caches")
    p.add_argument("--json", help="write all rows here")
    args = p.parse_args()
    args.python = os.path.abspath(args.python)  # not realpath: a venv's python is a link
    args.model = os.path.abspath(args.model)
    text = args.settings if args.settings.lstrip()[:1] in "[{" else open(args.settings).read()
    data = json.loads(text)
    settings = [dict(v, name=k) for k, v in data.items()] if isinstance(data, dict) else data
    if args.only:
        settings = [next(s for s in settings if s["name"] == n) for n in args.only.split(",")]
    os.makedirs(args.work, exist_ok=True)
    # A killed benchmark must not leave its server behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    rows: list[dict[str, Any]] = []
    if args.cold:
        for s in settings:
            shutil.rmtree(os.path.join(args.work, "cache", s["name"]), ignore_errors=True)
            rows.append(measure(args, s, "cold", speed=False))
    for i in range(args.rounds):
        # every other round backwards: drift hits all settings alike
        for s in settings[:: -1 if i % 2 else 1]:
            rows.append(measure(args, s, f"warm{i + 1}", speed=not args.no_speed))
    if args.json:
        with open(args.json, "w") as f:
            json.dump(rows, f, indent=1)
    print(table(rows, [s["name"] for s in settings]))


if __name__ == "__main__":
    main()
