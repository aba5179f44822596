"""`--json` is one rule for all verbs: facts as a document, wrong usage too, and every option says what it does."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from corral.base.files import write_atomic
from corral.base.processes import own_identity
from corral.base.record import dump_json
from corral.cli import fleet, main, root, tunnel
from corral.client.endpoint import Endpoint
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.lifecycle.deployments import Record
from corral.serve.fleet.record import FleetFolder
from tests.chains import write_chain

WITHOUT = {
    "chat": "a conversation; /save keeps it as JSON",
    "fake-server": "prints JSON always",
    "profile trust": "notes a folder, and prints no facts",
}


def commands(group: click.Group = root, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        one = group.get_command(context, name)
        assert one is not None
        if isinstance(one, click.Group):
            yield from commands(one, (*path, name))
        if not isinstance(one, click.Group) or one.invoke_without_command:
            yield " ".join((*path, name)), one


COMMANDS = dict(commands())


def flags(command: click.Command) -> set[str]:
    return {flag for parameter in command.params for flag in parameter.opts}


def test_every_verb_that_prints_facts_has_it() -> None:
    assert {name for name, command in COMMANDS.items() if "--json" not in flags(command)} == set(WITHOUT)


def test_model_names_one_that_is_there() -> None:
    """What a verb starts or plans is an argument, or has a name of its own; `--model` is served."""
    shown = {
        name: option.help or ""
        for name, command in COMMANDS.items()
        for option in command.params
        if isinstance(option, click.Option) and "--model" in option.opts and not option.hidden
    }
    assert {name for name, text in shown.items() if "served" not in text.lower()} == set()
    assert "--start" in flags(COMMANDS["batch run"])


def test_every_option_says_what_it_does() -> None:
    silent = [
        f"{name} {option.opts[0]}"
        for name, command in COMMANDS.items()
        for option in command.params
        if isinstance(option, click.Option) and not option.hidden and not option.help and not command.hidden
    ]
    assert silent == []


@pytest.mark.parametrize("name", COMMANDS)
def test_wrong_usage_is_a_document(name: str, clean_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*name.split(), "--no-such-option", "--json"])
    assert ended.value.code == 2
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert document["exit_code"] == 2
    assert "--no-such-option" in document["error"]["message"]
    assert "Traceback" not in said.err


@pytest.fixture
def one(clean_home: Path) -> DeploymentFolder:
    """A deployment elsewhere, with an address here."""
    folder = DeploymentFolder.of("one")
    folder.create()
    write_atomic(folder.record, dump_json(Record("one", "id", "m", "m", "slurm", 1.0, own_identity())))
    write_atomic(folder.endpoint, dump_json(Endpoint("http://127.0.0.1:8000/v1", "m")))
    return folder


def facts(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    with pytest.raises(SystemExit) as ended:
        main([*words, "--json"])
    assert ended.value.code == 0
    return json.loads(capsys.readouterr().out)


def test_a_tunnel(one: DeploymentFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    address = {"name": "one", "url": "http://127.0.0.1:8000/v1"}
    assert facts(capsys, "tunnel", "one") == {**address, "needed": False, "held_by": None}
    monkeypatch.setattr(tunnel, "needs_tunnel", lambda _: True)
    monkeypatch.setattr(tunnel, "hold_tunnel", lambda *_: None)
    assert facts(capsys, "tunnel", "one") == {**address, "needed": True, "held_by": os.getpid()}
    monkeypatch.setattr(tunnel, "tunnel_holder", lambda _: own_identity())
    assert facts(capsys, "tunnel", "one", "--background")["held_by"] == os.getpid()
    closed: list[DeploymentFolder] = []
    monkeypatch.setattr(tunnel, "close_tunnel", closed.append)
    assert facts(capsys, "tunnel", "one", "--close") == {**address, "needed": True, "held_by": None}
    assert [folder.name for folder in closed] == ["one"]


def test_a_renewal(
    one: DeploymentFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def kept(folder: FleetFolder, say: Callable[[str], None], *_: object) -> str:
        say("submitting one~2")
        return "one~2 was the last of 2"

    write_chain("one")
    monkeypatch.setattr(fleet, "keep", kept)
    monkeypatch.setattr("corral.cli.fleet.signal.signal", lambda *_: None)  # this process keeps its own
    with pytest.raises(SystemExit):
        main(["renew", "one", "--json"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["event"], line["text"]) for line in lines] == [
        ("renewal", "submitting one~2"),
        ("end", "one~2 was the last of 2"),
    ]


def test_a_script(one: DeploymentFolder, capsys: pytest.CaptureFixture[str]) -> None:
    one.script.write_text("#!/bin/bash\n")
    document = facts(capsys, "slurm", "script", "one")
    assert document == {"name": "one", "path": str(one.script), "script": "#!/bin/bash\n"}
