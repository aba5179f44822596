"""`corral profile`: where and how to run, written once and used by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from corral.base.errors import ConflictError, CorralError, DataError, UsageError
from corral.base.ssh import typed_hosts
from corral.cli.help_pages import WholeGroup
from corral.cli.options import json_option
from corral.deploy.profile import folders
from corral.deploy.profile.drafting import as_toml, draft, parse_value, with_value
from corral.deploy.profile.merging import merged
from corral.deploy.profile.profile import Profile, all_profiles, load_profile
from corral.deploy.profile.reading import parse
from corral.deploy.targets.keys import target_tables
from corral.engines.flags import check_arguments, shipped_flags
from corral.lab.report.screen import print_json, print_table


@click.group(cls=WholeGroup)
def command() -> None:
    """Profiles say where and how to run; `corral up MODEL --on NAME` uses one. docs/profiles.md lists the keys."""


@command.command("init")
@click.argument("name")
@click.option("--from", "example", metavar="EXAMPLE", help="Begin with a shipped example (`corral profile list`).")
@click.option("--hosts", metavar="A,B,…", help="Hosts for ssh, head first; @FILE: one per line.")
@click.option("--set", "pairs", multiple=True, metavar="TABLE.KEY=VALUE", help="Set a key: slurm.account=my_lab.")
@click.option("--project", is_flag=True, help="Write .corral/profiles here instead of the user's own folder.")
@click.option("--force", is_flag=True, help="Overwrite a profile of that name.")
@json_option()
def init(
    name: str,
    example: str | None,
    hosts: str | None,
    pairs: tuple[str, ...],
    project: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Write a commented profile called NAME, to be edited. Exits 4 when there is one already."""
    folders.check_name(name)
    folder = folders.project_folders()[0] if project else folders.user_folder()
    path = folder / f"{name}.toml"
    if not force and (path.exists() or path.is_symlink()):
        raise ConflictError(f"{path} already exists.", "Edit it, choose another name, or overwrite it with --force.")
    text = _first_text(example, _assignments(hosts, pairs))
    parse(text, str(path))
    _write(path, text)
    profile = load_profile(name, {})
    if as_json:
        print_json({"name": name, "path": str(path), "to_fill_in": profile.to_fill_in()})
        return
    click.echo(f"{path} is written.")
    if profile.to_fill_in():
        click.echo(f"Fill in: {', '.join(profile.to_fill_in())}")
    click.echo(f"Then: corral profile check {name}")


def _assignments(hosts: str | None, pairs: tuple[str, ...]) -> dict[str, Any]:
    assignments: dict[str, Any] = {}
    if hosts is not None:
        assignments["ssh.hosts"] = list(typed_hosts(hosts))
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key.strip():
            raise UsageError(f"--set {pair!r} is not TABLE.KEY=VALUE.", "For example --set slurm.account=my_lab.")
        assignments[key.strip()] = parse_value(value.strip())
    return assignments


def _first_text(example: str | None, assignments: dict[str, Any]) -> str:
    if example is not None:
        text = folders.example(example).read_text(encoding="utf-8")
    else:
        tables = {key.partition(".")[0] for key in assignments}
        target = next((name for name in target_tables() if name in tables), "local")
        text = draft({"target": assignments.pop("target", target)})
    for key, value in assignments.items():
        text = with_value(text, key, value)
    return text


def _write(path: Path, text: str) -> None:
    from corral.base.files import write_atomic

    if path.is_dir() and not path.is_symlink():
        raise ConflictError(f"{path} is a folder.", "Move it away.")
    for folder in (path.parent.parent, path.parent):  # a profile that others may write to is not used
        folder.mkdir(parents=True, exist_ok=True, mode=0o755)
    write_atomic(path, text, 0o644)


@command.command("trust")
@click.argument("folder", type=click.Path(path_type=Path))
def trust(folder: Path) -> None:
    """Use the profiles of a project's FOLDER although other users may write to it: they can run commands as you."""
    file = folders.trust(folder.expanduser().absolute())
    click.echo(f"Its profiles are used from now on. To end that, delete its line in {file}", err=True)


@command.command("list")
@json_option()
def list_profiles(as_json: bool) -> None:
    """Every profile: the project's, your own, and shipped examples."""
    profiles = all_profiles()
    if as_json:
        print_json([
            {"name": one.name, "where": one.kinds, "path": one.path, "target": one.profile and one.profile.target,
             "description": one.profile and one.profile.settings.description,
             "error": one.error and one.error.message}
            for one in profiles
        ])  # fmt: skip
        return
    rows = []
    for one in profiles:
        target = one.profile.target if one.profile else "broken"
        text = one.profile.settings.description if one.profile else one.error.message if one.error else ""
        rows.append([one.name, " over ".join(one.kinds), target, text])
    print_table(["NAME", "WHERE", "TARGET", "DESCRIPTION"], rows)


@command.command("show")
@click.argument("name")
@click.option("--all", "everything", is_flag=True, help="Also keys without a value.")
@json_option()
def show(name: str, everything: bool, as_json: bool) -> None:
    """Show a profile, resolved, with the origin of each value: a file and line, a variable, a default."""
    profile = load_profile(name)
    rows = [row for row in profile.rows() if everything or row[1] not in (None, "", (), {})]
    if as_json:
        values = [{"key": key, "value": value, "from": origin} for key, value, origin in rows]
        files = [layer.label for layer in reversed(profile.layers)]
        print_json({"name": name, "files": files, "values": values, "to_fill_in": profile.to_fill_in()})
        return
    print_table(["KEY", "VALUE", "FROM"], [[key, _shown(value), origin] for key, value, origin in rows])
    if profile.to_fill_in():
        click.echo(f"To fill in: {', '.join(profile.to_fill_in())}", err=True)


def _shown(value: object) -> str:
    return "-" if value is None else as_toml(value)


@command.command("check")
@click.argument("names", nargs=-1)
@json_option()
def check(names: tuple[str, ...], as_json: bool) -> int:
    """Check profiles (default: all but the shipped examples) without touching a node.

    Exits 0 when all is well, 3 when there is no such profile, 10 when one of them cannot be used as it stands.
    """
    chosen = names or tuple(one.name for one in all_profiles() if one.kinds != ("example",))
    for name in chosen:
        folders.find(name)
    problems = {name: _problems_of(name) for name in chosen}
    if as_json:
        print_json({name: [_as_document(error) for error in errors] for name, errors in problems.items()})
    for name, errors in problems.items():
        if not as_json:
            click.echo(f"{name}: {'ok' if not errors else ''}".rstrip())
            for error in errors:
                click.echo(f"  {error.message}")
                click.echo(f"    → {error.remedy}")
    if not chosen and not as_json:
        click.echo("No profiles of your own. `corral profile init NAME --from EXAMPLE` begins one.", err=True)
    return DataError.exit_code if any(problems.values()) else 0


def _as_document(error: CorralError) -> dict[str, str]:
    return {"kind": type(error).__name__, "message": error.message, "remedy": error.remedy}


def _problems_of(name: str) -> list[CorralError]:
    try:
        profile = load_profile(name, {})
    except CorralError as error:
        others = error.details.get("others", ())
        return [error, *(DataError(one["message"], one["remedy"]) for one in others)]
    checks = (_check_request, _check_runtime, _check_target, _check_arguments, _check_environment, _check_plan)
    problems = []
    for check in checks:
        try:
            check(profile)
        except CorralError as error:
            problems.append(error)
    return problems


def _check_request(profile: Profile) -> None:
    merged(profile, {})


def _check_runtime(profile: Profile) -> None:
    from corral.engines import PINNED_VERSION
    from corral.engines.runtimes.base import NodeSide, make_runtime

    named = profile.inventory()
    flavour = "cpu" if named and named.gpu is None else "cuda"
    home = profile.settings.storage.home or "~/.local/share/corral"
    make_runtime(profile.runtime, profile.runtime_options, NodeSide(home, flavour, PINNED_VERSION))


def _check_target(profile: Profile) -> None:
    from corral.deploy.targets.base import load_target

    if not profile.missing():  # already refused
        load_target(profile.target, profile.target_options)


def _check_arguments(profile: Profile) -> None:
    if flags := shipped_flags():
        check_arguments(profile.settings.engine.args, flags)


def _check_environment(profile: Profile) -> None:
    from corral.deploy.launch.render import refuse_reserved

    refuse_reserved({**profile.settings.network.env, **profile.settings.engine.env})


def _check_plan(profile: Profile) -> None:
    from corral.plan.settings import read_fixed

    read_fixed(profile.settings.defaults.set)
