"""What another user of the same machine tries: profiles planted in shared folders, a home that he may write to."""

from __future__ import annotations

import grp
import os
import pwd
from collections.abc import Callable
from pathlib import Path

import pytest

from corral.base.errors import AccessError
from corral.base.files import make_private_dir
from corral.base.home import engines_dir, home_dir
from corral.base.lock import exclusive_lock
from corral.base.owners import writable_by_others
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.start_times import remember_start
from corral.deploy.profile import folders
from corral.deploy.profile.profile import all_profiles, load_profile
from corral.engines import environments
from corral.plan.measured import StorageReading, remember_storage_speed
from corral.serve.gateway.keys import add_key
from tests.unit.conftest import in_process

STRANGER = 54321


def give_away(monkeypatch: pytest.MonkeyPatch, *paths: Path) -> None:
    """The paths belong to somebody else from here on."""
    if os.geteuid() == 0:
        for path in paths:
            os.chown(path, STRANGER, STRANGER, follow_symlinks=False)
        return
    real, given = Path.lstat, {os.fspath(path) for path in paths}

    def lstat(path: Path) -> os.stat_result:
        status = real(path)
        other = os.fspath(path) in given
        return os.stat_result([*status[:4], STRANGER, *status[5:]]) if other else status

    monkeypatch.setattr(Path, "lstat", lstat)


@pytest.fixture
def shared(tmp_path: Path, clean_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like /tmp, in which this user works, with a profile in it."""
    shared = tmp_path / "shared"
    planted = shared / ".corral" / "profiles"
    planted.mkdir(parents=True)
    for folder in (shared / ".corral", planted):
        folder.chmod(0o755)
    (shared / ".git").mkdir()
    config = shared / "ssh_config"
    config.write_text(f"Host *\nProxyCommand touch {shared}/ran\n")
    (planted / "mine.toml").write_text(f'target = "ssh"\n[ssh]\nhosts = ["node00"]\nconfig = "{config}"\n')
    (planted / "mine.toml").chmod(0o644)
    shared.chmod(0o1777)
    work = shared / "work"
    work.mkdir(mode=0o755)
    monkeypatch.chdir(work)
    return shared


@pytest.mark.parametrize("words", [("doctor", "--on", "mine", "--quick", "--deadline", "5s"),
                                   ("up", "--on", "mine", "smollm2", "--dry-run"),
                                   ("plan", "smollm2", "--on", "mine")])  # fmt: skip
def test_a_profile_that_another_user_planted_runs_nothing(
    shared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    planted = shared / ".corral"
    give_away(monkeypatch, planted, planted / "profiles", planted / "profiles" / "mine.toml")
    code, _, err = in_process(capsys)(*words)
    assert code == AccessError.exit_code, err
    assert str(planted / "profiles" / "mine.toml") in err
    assert f"corral profile trust {shared}" in err
    assert not (shared / "ran").exists()


@pytest.mark.parametrize("part", [".", ".corral", ".corral/profiles", ".corral/profiles/mine.toml"])
@pytest.mark.parametrize("how", ["owner", "everybody", "group"])
def test_each_part_of_a_projects_profile_must_be_mine(
    shared: Path, monkeypatch: pytest.MonkeyPatch, part: str, how: str
) -> None:
    path = shared / part
    assert load_profile("mine").target == "ssh"  # a sticky parent is fine
    if how == "owner":
        give_away(monkeypatch, path)
    elif how == "everybody":
        path.chmod(0o777)
    else:
        path.chmod(0o775)
        monkeypatch.setattr(grp, "getgrgid", lambda gid: grp.struct_group(("lab", "x", gid, ["ada", "grace"])))
    with pytest.raises(AccessError) as refused:
        load_profile("mine")
    assert str(path) in refused.value.message
    listed = {one.name: one for one in all_profiles()}["mine"]
    assert isinstance(listed.error, AccessError)


def test_a_group_of_one_is_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian and Red Hat give each user a group of his own, and a umask that lets it write."""
    me = pwd.getpwuid(os.geteuid()).pw_name
    path = tmp_path / "x"
    path.write_text("")
    path.chmod(0o664)
    monkeypatch.setattr(grp, "getgrgid", lambda gid: grp.struct_group((me, "x", gid, [])))
    assert writable_by_others(path) == ""
    monkeypatch.setattr(grp, "getgrgid", lambda gid: grp.struct_group((me, "x", gid, ["grace"])))
    assert "group" in writable_by_others(path)


def test_a_link_to_what_is_mine_is_not_mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_text("")
    (tmp_path / "link").symlink_to("x")
    assert writable_by_others(tmp_path / "link") == ""
    give_away(monkeypatch, tmp_path / "link")
    assert "belongs to" in writable_by_others(tmp_path / "link")


def test_a_shared_project_is_trusted_when_its_user_says_so(
    shared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give_away(monkeypatch, shared / ".corral" / "profiles" / "mine.toml")
    run = in_process(capsys, "profile")
    code, _, err = run("trust", str(shared))
    assert code == 0, err
    assert load_profile("mine").target == "ssh"
    assert (folders.user_folder().parent / "trusted-folders").stat().st_mode & 0o077 == 0
    code, _, err = run("trust", str(shared / "nothing"))
    assert code == 3
    assert "nothing" in err


MAKERS: dict[str, Callable[[], object]] = {
    "a key": lambda: add_key("x"),
    "a lock": lambda: (
        exclusive_lock(engines_dir() / ".x.lock", lambda _: None).__enter__().__exit__(None, None, None)
    ),
    "an engine": lambda: environments._refuse_small_disk("cpu"),
    "lengths of starts": lambda: remember_start("kind", {"loading": 1.0}),
    "storage": lambda: remember_storage_speed(home_dir(), "CPU", StorageReading(1.0, "x", 0.0)),
    "a deployment": lambda: DeploymentFolder.of("x").create(),
}


@pytest.mark.parametrize("what", MAKERS)
def test_a_new_home_is_private_whatever_the_umask(clean_home: Path, what: str) -> None:
    before = os.umask(0o002)
    try:
        MAKERS[what]()
    finally:
        os.umask(before)
    assert home_dir().stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(("part", "words"), [("gateway", ("gateway", "key", "list")), ("engines", ("engine", "list")),
                                             ("deployments", ("ps",)), ("fleets", ("ps",))])  # fmt: skip
def test_what_a_colleague_put_into_the_home_is_not_used(
    clean_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    part: str, words: tuple[str, ...],
) -> None:  # fmt: skip
    """A home that was made under umask 002: whoever may write to it can replace a folder in it."""
    folder = home_dir() / part
    make_private_dir(folder)
    run = in_process(capsys)
    assert run(*words)[0] == 0
    give_away(monkeypatch, folder)
    code, _, err = run(*words)
    assert code == AccessError.exit_code
    assert str(folder) in err
    assert str(STRANGER) in err
    monkeypatch.setenv("CORRAL_TRUST_USERS", str(STRANGER))
    assert run(*words)[0] == 0


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_home_that_everybody_may_write_to_is_refused(
    clean_home: Path, capsys: pytest.CaptureFixture[str], mode: int
) -> None:
    make_private_dir(home_dir())
    home_dir().chmod(mode)
    code, _, err = in_process(capsys)("ps")
    assert code == AccessError.exit_code
    assert f"everybody may write to {home_dir()}" in err
