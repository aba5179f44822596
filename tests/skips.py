"""Which tests may be skipped, in which tier, and on what machine: one list. Any other skip is a failure.

A reason holds only where it is true: `when` looks at this machine, so that root with the packages of
`tools/install_testbed.sh` skips nothing but what the machine itself cannot do. An expected failure counts as a skip.
The judgement is made where the report is made, so it is the same under xdist and for a test that is run again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.testbed import NO_NAMESPACES, NOT_ROOT, PATH, UNAVAILABLE, makes_namespaces

NO_SHELLCHECK = "there is no shellcheck, and only root can install it"
NO_OPENSSL = "there is no openssl, and only root can install it"
NO_BROWSER = "there is no chromium, and only root can install it"
NO_MOUNT = "this machine mounts nothing"
CLIENTS = Path(__file__).parent.parent / ".scratch" / "clients"  # environments of other people's clients
NO_CLIENT = "the package index has no "
NO_COMPILER = "there is no C compiler, and only root can install it"


@dataclass(frozen=True)
class Known:
    """One reason to skip: the tiers that may give it, how its text begins, and whether it is true here."""

    tiers: tuple[str, ...]
    reason: str
    when: Callable[[], bool]


def without_root(program: str = "") -> Callable[[], bool]:
    return lambda: os.geteuid() != 0 and not (program and shutil.which(program, path=PATH))


def lacks_namespaces() -> bool:
    return os.geteuid() == 0 and not makes_namespaces()


def lacks_clients() -> bool:
    return any(path.read_text() != "{}" for path in CLIENTS.glob("*/missing.json"))


KNOWN = (
    Known(("unit", "cluster", "integration"), NOT_ROOT, without_root()),
    Known(("unit",), NO_SHELLCHECK, without_root("shellcheck")),
    Known(("unit",), NO_OPENSSL, without_root("openssl")),
    Known(("cluster",), NO_COMPILER, without_root("cc")),
    Known(("clients",), NO_CLIENT, lacks_clients),
    Known(("e2e", "integration"), NO_BROWSER, without_root("chromium")),
    # a container without privileges, root's own or not
    Known(("cluster", "integration"), NO_NAMESPACES, lacks_namespaces),
    Known(("unit",), NO_MOUNT, lacks_namespaces),
    # Debian 12 has no package; tools/install_apptainer.sh takes it from a newer suite, or writes down why not
    Known(("cluster",), "no Apptainer: ", UNAVAILABLE.exists),
)


def tier_of(path: Path) -> str:
    """`unit` for tests/unit/test_x.py."""
    parts = path.parts
    return parts[parts.index("tests") + 1] if "tests" in parts[:-1] else ""


def refusal(tier: str, reason: str) -> str:
    """Why this skip is none, or an empty string."""
    for known in KNOWN:
        if tier in known.tiers and reason.startswith(known.reason):
            return "" if known.when() else f"skipped for a reason that is not true here: {reason}"
    return (
        f"skipped, and the tier {tier} has no such reason on its list (tests/skips.py): {reason}\n"
        "What a machine lacks is installed by tools/install_testbed.sh, as root."
    )


def judge(report: pytest.TestReport | pytest.CollectReport, path: Path) -> None:
    """Turns a skip that is not on the list into a failure."""
    if report.outcome != "skipped":
        return
    told = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(getattr(report, "wasxfail", ""))
    if why := refusal(tier_of(path), told.removeprefix("Skipped: ")):
        report.outcome = "failed"
        report.longrepr = why
        if hasattr(report, "wasxfail"):
            del report.wasxfail


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    judge(report, item.path)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    judge(report, collector.path)
    return report
