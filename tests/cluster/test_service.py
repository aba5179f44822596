"""What starts keepers after a boot, for real: units as systemd reads them, and cron with a table of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from corral.base.lock import lock_holder
from corral.serve.fleet.record import Fleet, create_fleet
from corral.serve.fleet.service import unit_text
from tests.testbed import missing
from tests.until import until

pytestmark = pytest.mark.skipif(bool(missing("boot")), reason=missing("boot"))

# a machine with a table of cron and a /run of its own; it has just booted
BOOT = """
mount -t tmpfs none /run
mount -t tmpfs none /var/spool/cron/crontabs
chgrp crontab /var/spool/cron/crontabs
chmod 1730 /var/spool/cron/crontabs
echo '# mine' | crontab -
"$@" -m corral service install --with cron --yes || exit 1
exec cron -f
"""


def test_a_unit_is_read_without_a_warning(tmp_path: Path) -> None:
    folder = tmp_path / 'o dd "100% $HOME'
    folder.mkdir()
    (folder / "python").symlink_to(sys.executable)
    words = [str(folder / "python"), "-m", "corral", "service", "run"]
    text = unit_text(words, {"CORRAL_HOME": str(folder), "A": "\\"})

    def verified(name: str, text: str) -> str:
        path = tmp_path / f"{name}.service"
        path.write_text(text)
        env = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
        done = subprocess.run(
            ["systemd-analyze", "--user", "verify", str(path)], env=env, capture_output=True, text=True, timeout=120
        )
        return done.stdout + done.stderr

    assert verified("corral", text) == ""
    assert "kill mode" in verified("wrong", text.replace("KillMode=process", "KillMode=none at all"))


def test_cron_starts_a_keeper_after_a_boot(clean_home: Path) -> None:
    folder = create_fleet(Fleet("herd", "m", 1, 1, 0, time.time()))
    namespaces = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
    words = [*namespaces, "sh", "-c", BOOT, "sh", sys.executable]
    machine = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        until(lambda: machine.poll() is not None or lock_holder(folder.keeper), "a keeper", 120)
        assert machine.poll() is None
        assert lock_holder(folder.keeper) is not None
    finally:
        machine.send_signal(signal.SIGKILL)
        said = machine.communicate(timeout=60)[0]
    assert "@reboot" in said
