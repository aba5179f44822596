"""A launch as commands to paste: without agents on one machine or over ssh, or as a batch job.

Each node gets its files, its secrets (made there, unless they exist) and one command per rank. Over ssh all of it is
pasted on this machine: workers go to the background, and the head comes last. A batch job is the very one that Corral
submits, with its agents: the command of each rank is shown above the template that holds it.

`masked` leaves out the values of secrets: a dry run is for terminals and tickets.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath

from corral.base.masking import MASK, is_secret_name, masked_argv, secrets_in, without
from corral.base.shell import quote_command
from corral.deploy.launch.links import RAY_SCRIPT
from corral.deploy.launch.render import QUICK_START, LaunchSpec, PlacedFile, RankSpec


def masked(spec: LaunchSpec) -> LaunchSpec:
    """The same launch without the values of secrets, wherever they are."""
    secrets = {value for rank in spec.ranks for name, value in rank.env.items() if is_secret_name(name) and value}
    secrets |= {value for rank in spec.ranks for value in secrets_in(rank.argv)}
    ranks = tuple(
        replace(
            rank,
            env={name: MASK if is_secret_name(name) else without(value, secrets) for name, value in rank.env.items()},
            argv=tuple(without(word, secrets) for word in masked_argv(rank.argv)),
        )
        for rank in spec.ranks
    )
    return replace(spec, ranks=ranks, script=without(spec.script, secrets))


END = "CORRAL"  # of a here-document


def as_shell(spec: LaunchSpec, reach: Mapping[str, Sequence[str]], first: Sequence[str] = ()) -> str:
    """Commands, the head's last; `reach` has the ssh command of each node, `first` comes before all."""
    lines = [f"# {spec.deployment}: {spec.model} with vLLM {spec.engine}", *first]
    if spec.link == "ray" and any(reach.values()):
        lines.append("# Ray wants one token: where the nodes share no files, copy the head's to the others first")
    for rank in reversed(spec.ranks):
        lines.append(f"# rank {rank.rank}, on {rank.node}")
        ssh = reach.get(rank.node, ())
        lines += _remote(spec, rank, ssh) if ssh else _here(spec, rank)
    return "\n".join(lines) + "\n"


def as_batch(spec: LaunchSpec, script: Path, templates: Mapping[Path, str], first: Sequence[str] = ()) -> str:
    """The files of a batch job, its script, and its submission."""
    node = _node_files(spec)
    lines = [f"# {spec.deployment}: {spec.model} with vLLM {spec.engine}", *first, "umask 077"]
    lines.append(quote_command(["mkdir", "-p", str(node), *(rank.cwd for rank in spec.ranks)]))
    lines += [_secret(path) for path in _secret_files(spec)]
    lines += [_placed(file, str(node / file.name)) for file in spec.files]
    for rank, (path, text) in zip(spec.ranks, templates.items(), strict=True):
        lines.append(f"# rank {rank.rank} runs this; what is in @…@ is found on the nodes:")
        lines.append(f"#   {_engine_of(rank.argv)}")
        lines += _written(path, json.dumps(json.loads(text), ensure_ascii=False))
    lines += _written(script, spec.script)
    lines.append(quote_command(["sbatch", str(script)]))
    lines.append(f"# when it is ready: {script.parent / 'endpoint.json'} has the address, and names the key's file")
    return "\n".join(lines) + "\n"


def _here(spec: LaunchSpec, rank: RankSpec) -> list[str]:
    files = [_placed(file, str(_node_files(spec) / file.name)) for file in _engine_files(spec)]
    return ["umask 077", *_prepared(spec, rank), *files, _command(rank)]


def _remote(spec: LaunchSpec, rank: RankSpec, ssh: Sequence[str]) -> list[str]:
    node = str(_node_files(spec))
    lines = []
    for file in _engine_files(spec):
        far = f"umask 077; mkdir -p {quote_command([node])} && cat >{quote_command([f'{node}/{file.name}'])}"
        lines.append(f"{_placed(file, '/dev/stdout')} | {quote_command([*ssh, far])}")
    background = " &" if rank.rank else ""
    lines.append(f"{quote_command([*ssh, 'sh', '-s'])} <<'{END}'{background}")
    return [*lines, "umask 077", *_prepared(spec, rank), f"exec {_command(rank)}", END]


def _prepared(spec: LaunchSpec, rank: RankSpec) -> list[str]:
    folders = quote_command(["mkdir", "-p", str(_node_files(spec)), rank.cwd])
    return [folders, *(_secret(path) for path in _secret_files(spec))]


def _command(rank: RankSpec) -> str:
    unset = [word for name in rank.unset_env for word in ("-u", name)]
    assignments = [f"{key}={value}" for key, value in sorted(rank.env.items())]
    return quote_command(["env", "-C", rank.cwd, *unset, *assignments, *rank.argv])


def _engine_of(argv: Sequence[str]) -> str:
    """The engine's own command, without the text of scripts around it, on one line."""
    scripts = [number for number, word in enumerate(argv) if "\n" in word]
    return quote_command(argv[scripts[-1] + 1 :] if scripts else argv)


def _written(path: Path, text: str) -> list[str]:
    return [f"cat >{quote_command([str(path)])} <<'{END}'", *text.rstrip("\n").split("\n"), END]


def _placed(file: PlacedFile, where: str) -> str:
    return quote_command([sys.executable, "-P", "-m", "corral.base.bundle", file.resource, where])


def _secret(path: str) -> str:
    """A command that writes random text into a file, once: several nodes may see the same file."""
    return f"[ -s {quote_command([path])} ] || {quote_command(['openssl', 'rand', '-hex', '-out', path, '24'])}"


def _secret_files(spec: LaunchSpec) -> list[str]:
    """The files of secrets that must exist before a launch by hand."""
    keys = {rank.serve.key_file for rank in spec.ranks if rank.serve}
    return sorted(keys | ({spec.gang.token_file} if spec.gang else set()))


def _engine_files(spec: LaunchSpec) -> list[PlacedFile]:
    """The files of Corral that the engines need when there are no agents."""
    needed = ["corral_guard.py", "corral_row_socket.py", *([RAY_SCRIPT] if spec.link == "ray" else [])]
    if any(QUICK_START in rank.argv for rank in spec.ranks):
        needed.append(f"{QUICK_START}.py")
    return [file for file in spec.files if file.name in needed]


def _node_files(spec: LaunchSpec) -> PurePath:
    return PurePath(spec.ranks[0].env["PYTHONPATH"])
