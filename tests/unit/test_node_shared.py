"""What travels to the nodes and serves Corral as well: whole files, free ports, processes told apart."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from corral.base import files, processes
from corral.node.files import read_json, write_atomic, write_json
from corral.node.processes import identity, is_running
from corral.node.sockets import free_port, free_ports


def test_corral_itself_has_no_other_answer() -> None:
    assert files.write_atomic is write_atomic
    assert vars(processes.identify(os.getpid())) == {**identity(os.getpid()), "namespace": ""}


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.json"
    write_json(str(path), {"a": 1})
    assert path.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("the disk is full")))
    with pytest.raises(OSError, match="full"):
        write_atomic(path, "half")
    assert read_json(str(path)) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


def test_writers_of_one_file_do_not_meet(tmp_path: Path) -> None:
    path, bodies = tmp_path / "x.json", [str(number) * 20_000 for number in range(4)]
    threads = [threading.Thread(target=write_atomic, args=(path, body)) for body in bodies for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_text() in bodies
    assert len(list(tmp_path.iterdir())) == 1


def test_what_is_no_object_is_read_as_nothing(tmp_path: Path) -> None:
    for text in ("", "{", "[1]", "null"):
        (tmp_path / "x").write_text(text)
        assert read_json(str(tmp_path / "x")) == {}
    assert read_json(str(tmp_path / "absent" / "x")) == {}


def test_ports_differ_and_are_nobodys() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        taken = holder.getsockname()[1]
        assert free_port("127.0.0.1", first=taken) != taken
        found = free_ports(20, avoid=[15000])
        assert len(set(found)) == 20
        assert not {taken, 15000} & set(found)
    assert free_port("127.0.0.1", first=taken) == taken


def test_a_process_is_told_from_a_later_one_of_its_number() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    own = identity(process.pid)
    assert is_running(own)
    assert not is_running({**own, "start_ticks": own["start_ticks"] - 1})
    assert not is_running({**own, "boot_id": "another"})
    process.communicate(b"\n")
    assert not is_running(own)
