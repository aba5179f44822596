"""An option means the same with every verb; old spellings are taken for a release, with a hint."""

from __future__ import annotations

import json
import re
from types import ModuleType

import click
import pytest

from corral.cli import root
from corral.cli.options import Duration
from tests.unit.conftest import in_process
from tests.unit.test_reference import load_tool


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_tool()


def values(option: click.Option) -> str:
    """What an option takes, as the parser sees it."""
    if option.is_flag:
        return "flag"
    if isinstance(option.type, click.Choice):
        return "|".join(sorted(map(str, option.type.choices)))
    kinds = {"float": "number", "integer": "number", "path": "text"}
    return kinds.get(option.type.name.removesuffix(" range"), option.type.name)


def shown_options(tool: ModuleType) -> dict[str, list[tuple[str, click.Option]]]:
    found = {
        name: [(path, one) for path, one in having if not one.hidden] for name, having in tool.all_options().items()
    }
    return {name: having for name, having in found.items() if having}


def faults(tool: ModuleType) -> list[str]:
    """Options with two meanings: other values, or a help text that does not say what the table says."""
    found = []
    for name, having in shown_options(tool).items():
        if not name.startswith("--"):
            longs = {long for _, one in having for long in one.opts if long.startswith("--")}
            if len(longs) > 1 and longs != tool.OTHER_SHORT.get(name):
                found.append(f"{name} is short for {sorted(longs)}")
            continue
        if len({values(one) for _, one in having}) > 1 and name not in tool.OTHER_VALUES:
            found.append(f"{name} takes {sorted({(values(one), path) for path, one in having})}")
        texts = {(one.help or "").lower() for _, one in having}
        needed = tool.MEANINGS[name][1] if name in tool.MEANINGS else None
        if len(texts) > 1 and not (needed and all(re.search(needed, text) for text in texts)):
            found.append(f"{name} means {sorted(((one.help or ''), path) for path, one in having)}")
    return found


def test_an_option_has_one_meaning_across_all_verbs(tool: ModuleType) -> None:
    assert faults(tool) == []
    having = shown_options(tool)
    unused = {name for name in (*tool.MEANINGS, *tool.OTHER_VALUES, *tool.OTHER_SHORT) if len(having[name]) < 2}
    assert not unused, "rows of the table that no two verbs need"


@pytest.mark.parametrize(
    "option",
    [
        click.Option(["--gpus"], type=int, help="Hardware counted."),
        click.Option(["--offline"], is_flag=True, help="Rows go into the engine's process."),
        click.Option(["--goal"], type=click.Choice(["cost", "rate"]), help="What comes first (default: balanced)."),
        click.Option(["--patience"], type=Duration(), help="Silence after which a node counts as lost."),
        click.Option(["-o", "--only"], help="Only these."),
    ],
)  # fmt: skip
def test_a_second_meaning_is_found(tool: ModuleType, option: click.Option) -> None:
    command = root.get_command(click.Context(root), "ps")
    assert command is not None
    command.params.append(option)
    try:
        (fault,) = faults(tool)
    finally:
        command.params.remove(option)
    assert fault.startswith(f"{option.opts[0]} ")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (("--prompt", "1000"), "--input-len"),
        (("--output", "99"), "--output-len"),
        (("--link", "ib-hdr"), "--network"),
    ],
)
def test_an_old_spelling_is_taken_with_a_hint(
    old: tuple[str, str], new: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    corral = in_process(capsys, "plan")
    asked = ("llama-3.1-8b", "--gpus", "8xH100", "--nodes", "2", "--json")
    code, before, hint = corral(*asked, *old)
    assert (code, hint) == (0, f"corral: {old[0]} is now {new}; the next release no longer takes {old[0]}\n")
    code, after, hint = corral(*asked, new, old[1])
    assert (code, hint) == (0, "")
    assert json.loads(before) == json.loads(after) != json.loads(corral(*asked)[1])


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("batch", "no.jsonl", "-o", "o", "--offline"), "--offline is now --in-process"),
        (("batch", "no.jsonl", "-o", "o", "--model", "m"), "--model is now --start"),
        (("batch", "serve", "--jobs", "0"), "--jobs is now --max-batches"),
        (("bench", "run", "--goodput", "none"), "--goodput is now --slo"),
        (("bench", "sweep", "--gpus", "no"), "--gpus is now --gpu-count"),
        (("bench", "--stall", "no"), "--stall is now --timeout"),
        (("up", "--patience", "1"), "--patience is now --node-timeout"),
        (("tune", "m", "--goal", "no"), "--goal is now --objective"),
        (("doctor", "--timeout", "1"), "--timeout is now --deadline"),
        (("doctor", "--model", "m", "--port", "no"), "--model MODEL is now MODEL alone"),
        (("simulate", "--model", "m"), "--model MODEL is now MODEL alone"),
        (("score", "-i", "no.jsonl", "-o", "o", "--restart", "--top", "no"), "--restart is now --force"),
        (("fake-server", "--host", "h", "--port", "no"), "--host is now --bind"),
    ],
)
def test_every_replaced_spelling_is_taken(
    words: tuple[str, ...], hint: str, capsys: pytest.CaptureFixture[str], clean_home: object
) -> None:
    """The rest of the command is wrong, so that nothing starts; the old spelling is not what is complained of."""
    code, _, told = in_process(capsys)(*words)
    first, _, rest = told.partition("\n")
    assert code != 0
    assert f"corral: {hint}; " in f"{first}\n{rest}"
    assert "no such option" not in rest.lower()
