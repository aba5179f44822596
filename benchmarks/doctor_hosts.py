"""How long the survey of `corral doctor` takes over many hosts, some of which hang: a stand-in for ssh runs it here.

    python benchmarks/doctor_hosts.py [HOSTS] [HUNG]

Each host that is well runs the real survey on this machine, so all of them share its cores: the time per host is an
upper limit. Hosts that hang cost the limit of one question, together, not each.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

from corral.base.ssh import Ssh
from corral.deploy.doctor.examination import SURVEY_S
from corral.plan.hardware.survey import Asked, NodeFacts, survey

SSH = """#!/bin/sh
for word; do
    [ "$word" = -G ] && exit 0
    [ "$last" = -- ] && break
    [ "$word" = -- ] || host=$word
    last=$word
done
case "$host" in hung*) exec sleep 600 ;; esac
exec sh -c "$word"
"""


def main() -> None:
    count, hung = (int(word) for word in (*sys.argv[1:], *("64", "0")[len(sys.argv) - 1 :]))
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "ssh"
        program.write_text(SSH)
        program.chmod(0o755)
        os.environ["CORRAL_SSH"] = str(program)
        hosts = [f"hung-{i}" for i in range(hung)] + [f"node-{i}" for i in range(count - hung)]
        began = time.monotonic()
        found = survey(Ssh(), hosts, Asked(), timeout_s=SURVEY_S, width=128)
        took = time.monotonic() - began
    well = [facts for facts in found.values() if isinstance(facts, NodeFacts)]
    print(f"{count} hosts, {hung} of them hung: {took:.1f} s; {len(well)} answered, {os.cpu_count()} cores here")


if __name__ == "__main__":
    main()
