"""Hosts: each is a network, uts, ipc, pid and mount namespace with an address, a hostname and an sshd of its own.

Every host sees the machine's files (a cluster with one shared file system), except that `/run`, `/dev/shm` and `/tmp`
are its own, that accounts and their homes come from the instance's folder (root's real home is out of sight), and
that directories named `private` are empty and its own (node-local disks). What lies below `folder` stays visible
everywhere, as do this checkout, this Python and other `shared` paths.

The bridge stands in a namespace too, and everything hangs on pipes held by this process: when it ends, however it
ends, the kernel takes processes, mounts and links away. No delay and no loss can be simulated; a cut cable can.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import random
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

from tests.testbed import PATH
from tests.until import polled

NAMESPACES = ("--net", "--uts", "--ipc", "--pid", "--mount")
GATEWAY, MACHINE = 254, 253
FIRST_UID = 20001
LEAST_S = 90.0
CHECKOUT = Path(__file__).resolve().parent.parent.parent


class Box:
    """Namespaces whose pid 1 is a shell that runs `script`, says so, and lives until this object lets go."""

    def __init__(self, namespaces: Sequence[str], script: str, log: Path, into: Sequence[str] = ()) -> None:
        self.namespaces = list(namespaces)
        pid_namespace = ["--fork", "--kill-child=KILL", "--mount-proc"] if "--pid" in namespaces else []
        # unshare forks into a pid namespace, and so does an nsenter that goes before it
        self.depth = ("--pid" in namespaces) + ("--pid" in into)
        self.log = log
        self.script = log.with_suffix(".sh")
        self.script.write_text(f"set -e\n{script}\necho up\nset +e\nwhile read -r _; do :; done\n")
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [*into, "unshare", *namespaces, *pid_namespace, "bash", str(self.script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd="/",
                env={**os.environ, "PATH": PATH},
                start_new_session=True,
            )
        self.pid = 0

    def wait_up(self) -> None:
        """Until the script has run; then `pid` is the box's pid 1 as the machine sees it."""
        assert self.process.stdout
        if self.process.stdout.readline() != b"up\n":
            self.down()
            raise RuntimeError(f"a box did not come up:\n{self.log.read_text()[-2000:]}")
        self.pid = self.process.pid
        for _ in range(self.depth):
            self.pid = _child_of(self.pid)

    def enter(self, *also: str) -> list[str]:
        """The command prefix that runs something inside."""
        return ["nsenter", "-t", str(self.pid), *self.namespaces, *also, "--"]

    def down(self) -> None:
        for pid in filter(None, (self.pid, self.process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream:
                stream.close()
        self.pid = 0


class Hosts:
    """Hosts on one network; a context manager. The first name is the head by convention only."""

    def __init__(
        self,
        folder: Path,
        names: Sequence[str] = ("head", "node1", "node2"),
        net: str | None = None,
        *,
        users: Sequence[str] = (),
        private: Sequence[str | Path] = (),
        shared: Sequence[str | Path] = (),
    ) -> None:
        self.folder = folder.resolve()
        self.names = tuple(names)
        self.net = net or _free_net()
        self.users = tuple(users)
        self.private = [Path(path) for path in private]
        self.shared = [
            self.folder,
            CHECKOUT,
            Path(sys.base_prefix).resolve(),
            *(Path(path).resolve() for path in shared),
        ]
        self.ignored = {"sshd"}  # daemons that belong to the host itself, not to what a test started
        self.ssh_config = self.folder / "ssh_config"
        self.known_hosts = self.folder / "known_hosts"
        # the machine's end of the cable to the switch: the only thing of ours that the machine sees
        self.link = f"tb{os.getpid() % 0xFFFFF:x}{random.randrange(0xFFF):03x}"
        self._boxes: dict[str, Box] = {}
        self._switch: Box | None = None
        self._networks: dict[str, tuple[str, tuple[str, ...]]] = {}

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    # what a test may ask

    def address(self, host: str, network: str = "eth0") -> str:
        net = self._networks[network][0] if network in self._networks else self.net
        return f"{net}.{self._number(host)}"

    @property
    def machine_address(self) -> str:
        """Where hosts find the machine on which the test runs."""
        return f"{self.net}.{MACHINE}"

    @property
    def ssh_command(self) -> list[str]:
        return ["ssh", "-F", str(self.ssh_config)]

    def home(self, user: str = "root") -> Path:
        """The home that hosts give to this user; the same on all of them."""
        return self.folder / "home" / user

    def uid(self, user: str) -> int:
        """The number of one of the `users`, which only the hosts know by name."""
        return FIRST_UID + self.users.index(user)

    def pid(self, host: str) -> int:
        """The host's pid 1 as the machine sees it; 0 when it is off."""
        self._number(host)
        return self._boxes[host].pid if host in self._boxes else 0

    def processes(self, host: str) -> list[tuple[int, str]]:
        """What runs on a host beyond its own daemons, as (the machine's pid, command line)."""
        first = self.pid(host)
        if not first:
            return []
        space = Path(f"/proc/{first}/ns/pid").readlink()
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == first:
                continue
            with contextlib.suppress(OSError):  # it ended while we looked
                if (entry / "ns/pid").readlink() != space:
                    continue
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                if line and (entry / "comm").read_text().strip() not in self.ignored:
                    found.append((int(entry.name), line))
        return found

    def enter(self, host: str, cwd: str | Path = "/") -> list[str]:
        """The command prefix that runs something on a host."""
        if not self.pid(host):
            raise RuntimeError(f"{host} is off")
        return self._boxes[host].enter(f"--wdns={cwd}")

    def exec(
        self,
        host: str,
        argv: Sequence[str],
        *,
        user: str | None = None,
        cwd: str | Path = "/",
        env: dict[str, str] | None = None,
        check: bool = True,
        timeout: float | None = 60,
        **options: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host, without ssh."""
        stdin: dict[str, Any] = {} if "input" in options else {"stdin": subprocess.DEVNULL}
        options = {"capture_output": True, "text": True} | stdin | options
        command, environment = self._entered(host, argv, user, cwd, env)
        done: subprocess.CompletedProcess[str]
        done = subprocess.run(command, env=environment, timeout=timeout, check=False, **options)
        if check and done.returncode:
            raise RuntimeError(f"{host}: {shlex.join(argv)}: {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done

    def popen(
        self,
        host: str,
        argv: Sequence[str],
        *,
        user: str | None = None,
        cwd: str | Path = "/",
        env: dict[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Start a command on a host."""
        command, environment = self._entered(host, argv, user, cwd, env)
        return subprocess.Popen(command, env=environment, **options)

    def ssh(self, host: str, command: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command line on a host, by ssh from the machine."""
        options = {"capture_output": True, "text": True, "timeout": 60, "stdin": subprocess.DEVNULL} | options
        return subprocess.run([*self.ssh_command, host, command], check=False, **options)

    # what a test may do to them

    def up(self) -> None:
        self._write_files()
        try:
            self._start_switch()
            self._boot(self.names)
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        for box in self._boxes.values():
            box.down()
        self._boxes.clear()
        if self._switch:
            self._switch.down()
            self._switch = None
            wait_for(lambda: not Path(f"/sys/class/net/{self.link}").exists(), 10, "the machine's link to go")
        self._networks.clear()

    def cut(self, host: str, network: str | None = None) -> None:
        """Pull the cable: of one network, or of all."""
        self._set_links(host, network, "down")

    def heal(self, host: str, network: str | None = None) -> None:
        self._set_links(host, network, "up")

    def power_off(self, host: str) -> None:
        """Pull the plug: nothing of the host is heard of any more, not even the end of its connections."""
        self.cut(host)
        self._boxes.pop(host).down()
        assert self._switch
        for link in [self._link(host, network) for network in self._networks_of(host)]:
            subprocess.run([*self._switch.enter(), "ip", "link", "del", link], capture_output=True, check=False)

    def power_on(self, host: str) -> None:
        """Boot a host again, with its old name, address and key, and nothing in its memory."""
        self._boot([host])

    def change_host_key(self, host: str) -> None:
        """Give the host another key, as a reinstalled machine has; clients still know the old one."""
        for path in (self._place(host) / "host_key", self._place(host) / "host_key.pub"):
            path.unlink()
        self._make_host_key(host)
        if self.pid(host):
            self.exec(host, ["kill", (self._place(host) / "sshd.pid").read_text().strip()])
            wait_for(lambda: not self._answers(host), 10, f"the sshd of {host} to stop")
            self._start_sshd(host)

    def trust(self, host: str) -> None:
        """Write the host's present key into known_hosts."""
        kind, key = (self._place(host) / "host_key.pub").read_text().split()[:2]
        names = f"{host},{self.address(host)}"
        others = self.known_hosts.read_text().splitlines() if self.known_hosts.exists() else []
        kept = [line for line in others if line.split()[0] != names]
        self.known_hosts.write_text("\n".join([*kept, f"{names} {kind} {key}"]) + "\n")

    def add_network(self, name: str, hosts: Iterable[str], net: str | None = None) -> None:
        """A second network that reaches only these hosts; `name` is the interface they see."""
        assert self._switch
        assert len(name) <= 9
        assert name not in ("eth0", "lo", *self._networks)
        self._networks[name] = (net or _free_net(self.net), tuple(hosts))
        self._switch_ip(f"link add br-{name} type bridge", f"link set br-{name} up")
        for host in self._networks[name][1]:
            self._connect(host, name)

    def add_interface(self, host: str, name: str, address: str) -> None:
        """An interface that leads nowhere, as a wrong choice for those who take the first they find."""
        self.exec(host, ["ip", "link", "add", name, "type", "dummy"], check=False)
        if f" {name}:" not in self.exec(host, ["ip", "link"]).stdout:  # a kernel without dummy links
            self.exec(host, ["ip", "link", "add", name, "type", "bridge"])
        self.exec(host, ["ip", "addr", "add", f"{address}/24", "dev", name])
        self.exec(host, ["ip", "link", "set", name, "up"])

    def limit_disk(self, host: str, path: str | Path, size_bytes: int) -> None:
        """A small empty disk over `path` of one host."""
        self.exec(host, ["mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=1777", "tmpfs", str(path)])

    def bind(self, host: str, source: str | Path, target: str | Path) -> None:
        """Let a host see `source` at `target`, until it is powered off."""
        self.exec(host, ["mount", "--bind", str(source), str(target)])

    # how it is done

    def _number(self, host: str) -> int:
        if host not in self.names:
            raise ValueError(f"there is no host {host}; there are {', '.join(self.names)}")
        return self.names.index(host) + 1

    def _place(self, host: str) -> Path:
        return self.folder / "hosts" / host

    def _entered(
        self, host: str, argv: Sequence[str], user: str | None, cwd: str | Path, env: dict[str, str] | None
    ) -> tuple[list[str], dict[str, str]]:
        become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", "--"] if user else []
        account = {"HOME": str(self.home(user or "root")), "USER": user or "root", "LOGNAME": user or "root"}
        environment = {**os.environ, "PATH": PATH} if env is None else {"PATH": PATH, **env}
        command = [*self.enter(host, cwd), *become, *argv]
        return command, {**environment, **account, **(env or {})}

    def _write_files(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)
        key = self.folder / "id"
        if not key.exists():
            _make_key(key)
        (self.folder / "authorized_keys").write_text(Path(f"{key}.pub").read_text())
        for host in self.names:
            (self._place(host) / "stage").mkdir(parents=True, exist_ok=True)
            if not (self._place(host) / "host_key").exists():
                self._make_host_key(host)
            (self._place(host) / "sshd_config").write_text(_sshd_config(self.folder, self._place(host)))
            self.trust(host)
        for path in self.private:
            if self.folder in path.parents:
                path.mkdir(parents=True, exist_ok=True)
            elif not path.is_dir():
                raise ValueError(f"{path} is to be private on each host, but there is no such directory to cover")
        lines = ["127.0.0.1 localhost", *(f"{self.address(host)} {host}" for host in self.names)]
        (self.folder / "hosts.txt").write_text("\n".join([*lines, f"{self.machine_address} machine"]) + "\n")
        self.ssh_config.write_text(self._client_config())
        self._write_accounts()

    def _client_config(self) -> str:
        entries = [f"Host {host}\n  HostName {self.address(host)}" for host in self.names]
        general = {
            "IdentityFile": self.folder / "id",
            "IdentitiesOnly": "yes",
            "StrictHostKeyChecking": "yes",
            "UserKnownHostsFile": self.known_hosts,
            "GlobalKnownHostsFile": "/dev/null",
            "ConnectTimeout": 3,
            "LogLevel": "ERROR",
        }
        return "\n".join([*entries, "Host *", *(f"  {name} {value}" for name, value in general.items())]) + "\n"

    def _write_accounts(self) -> None:
        """The machine's accounts with homes of ours, and the wanted users, who belong to themselves."""
        passwd, group, shadow = (_lines(f"/etc/{name}") for name in ("passwd", "group", "shadow"))
        passwd = [line for line in passwd if not line.startswith("root:")]
        passwd.insert(0, f"root:x:0:0:root:{self.home()}:/bin/bash")
        for uid, user in enumerate(self.users, FIRST_UID):
            passwd.append(f"{user}:x:{uid}:{uid}::{self.home(user)}:/bin/bash")
            group.append(f"{user}:x:{uid}:")
            shadow.append(f"{user}:*:19000:0:99999:7:::")  # no password, but not locked: keys are let in
        for name, lines, mode in (("passwd", passwd, 0o644), ("group", group, 0o644), ("shadow", shadow, 0o600)):
            (self.folder / name).write_text("\n".join(lines) + "\n")
            (self.folder / name).chmod(mode)
        for uid, user in [(0, "root"), *enumerate(self.users, FIRST_UID)]:
            ssh = self.home(user) / ".ssh"
            ssh.mkdir(parents=True, exist_ok=True, mode=0o700)
            if user == "root":
                (ssh / "config").write_text(f"Include {self.ssh_config}\n")
            for path in (self.home(user), ssh):
                os.chown(path, uid, uid)
                path.chmod(0o700)

    def _make_host_key(self, host: str) -> None:
        _make_key(self._place(host) / "host_key")

    def _start_switch(self) -> None:
        """The bridge, in a namespace of its own, with one cable to the machine; what leads elsewhere is refused."""
        self._switch = Box(
            ["--net"],
            f"ip link set lo up; ip link add br-eth0 type bridge; ip addr add {self.net}.{GATEWAY}/24 dev br-eth0\n"
            "ip link set br-eth0 up; echo 1 >/proc/sys/net/ipv4/ip_forward",
            self.folder / "switch.log",
        )
        self._switch.wait_up()
        peer = ["peer", "name", "machine", "netns", str(self._switch.pid)]
        _run(["ip", "link", "add", self.link, "type", "veth", *peer])
        _run(["ip", "addr", "add", f"{self.machine_address}/24", "dev", self.link])
        _run(["ip", "link", "set", self.link, "up"])
        self._switch_ip("link set machine master br-eth0 up")

    def _boot(self, hosts: Iterable[str]) -> None:
        hosts = tuple(hosts)
        for host in hosts:
            assert not self.pid(host), f"{host} is on"
            self._boxes[host] = Box(NAMESPACES, self._boot_script(host), self._place(host) / "boot.log")
        for host in hosts:
            self._boxes[host].wait_up()
            for network in self._networks_of(host):
                self._connect(host, network)
            self._start_sshd(host)

    def _boot_script(self, host: str) -> str:
        stage = shlex.quote(str(self._place(host) / "stage"))
        lines = [
            f"hostname {host}; ip link set lo up",
            # its own view of network devices, with the machine's cgroups
            f"mount -n -t sysfs sysfs {stage}",
            f"mount -n --rbind /sys/fs/cgroup {stage}/fs/cgroup; mount -n --move {stage} /sys",
        ]
        covers = [(Path("/run"), "755"), (Path("/dev/shm"), "1777"), (Path("/tmp"), "1777")]
        home = Path(pwd.getpwuid(0).pw_dir)  # closed to other users, who need the interpreter that may lie in it
        covers += [(home, "755")] if home.is_dir() and home != Path("/") else []
        for cover, mode in [*covers, *((path, "755") for path in self.private)]:
            lines.append(f"mount -n -t tmpfs -o mode={mode} tmpfs {stage}")
            for path in [path for path in self.shared if cover in path.parents]:
                inner = f"{stage}/{shlex.quote(str(path.relative_to(cover)))}"
                lines.append(f"mkdir -p {inner}; mount -n --bind {shlex.quote(str(path))} {inner}")
            lines.append(f"mount -n --move {stage} {shlex.quote(str(cover))}")
        files = {"hosts.txt": "hosts"} | {name: name for name in ("passwd", "group", "shadow")}
        lines += [
            f"mount -n --bind {shlex.quote(str(self.folder / ours))} /etc/{name}" for ours, name in files.items()
        ]
        return "\n".join([*lines, "mkdir -p /run/sshd /run/lock"])

    def _networks_of(self, host: str) -> list[str]:
        return ["eth0", *(name for name, (_, hosts) in self._networks.items() if host in hosts)]

    def _link(self, host: str, network: str) -> str:
        return f"{network}-{self._number(host)}"

    def _connect(self, host: str, network: str) -> None:
        link = self._link(host, network)
        net = [int(part) for part in self.address(host, network).split(".")]
        card = "02:00:" + ":".join(f"{part:02x}" for part in net)  # the same after a reboot
        self._switch_ip(
            f"link add {link} type veth peer name {network} address {card} netns {self.pid(host)}",
            f"link set {link} master br-{network} up",
        )
        lines = [f"addr add {self.address(host, network)}/24 dev {network}", f"link set {network} up"]
        lines += [f"route add default via {self.net}.{GATEWAY}"] if network == "eth0" else []
        _run([*self._boxes[host].enter(), "ip", "-batch", "-"], "\n".join(lines))

    def _set_links(self, host: str, network: str | None, state: str) -> None:
        for name in [network] if network else self._networks_of(host):
            self._switch_ip(f"link set {self._link(host, name)} {state}")

    def _switch_ip(self, *lines: str) -> None:
        assert self._switch
        _run([*self._switch.enter(), "ip", "-batch", "-"], "\n".join(lines))

    def _start_sshd(self, host: str) -> None:
        place = self._place(host)
        sshd = ["/usr/sbin/sshd", "-f", str(place / "sshd_config"), "-E", str(place / "sshd.log")]
        self.exec(host, sshd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, capture_output=False)
        wait_for(lambda: self._answers(host), 10, f"the sshd of {host}")

    def _answers(self, host: str) -> bool:
        with contextlib.suppress(OSError), socket.create_connection((self.address(host), 22), timeout=1):
            return True
        return False


def wait_for(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Poll until it holds; a testbed that does not get there is broken and says what it waited for.

    On a busy machine nothing is quick: less than `LEAST_S` is not taken at its word.
    """
    timeout_s = max(timeout_s, LEAST_S)
    if not polled(condition, timeout_s):
        raise TimeoutError(f"waited {timeout_s:g} s for {what}")


def _sshd_config(folder: Path, place: Path) -> str:
    settings = {
        "Port": 22,
        "HostKey": place / "host_key",
        "PidFile": place / "sshd.pid",
        "AuthorizedKeysFile": folder / "authorized_keys",
        "StrictModes": "no",
        "UsePAM": "no",
        "PasswordAuthentication": "no",
        "KbdInteractiveAuthentication": "no",
        "PermitRootLogin": "prohibit-password",
        "MaxStartups": 100,
        "MaxSessions": 100,
        "UseDNS": "no",
        "Subsystem": "sftp internal-sftp",
    }
    return "".join(f"{name} {value}\n" for name, value in settings.items())


def _make_key(path: Path) -> None:
    _run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path)])


def _run(command: Sequence[str], text: str = "") -> str:
    done = subprocess.run(
        command, input=text, env={**os.environ, "PATH": PATH}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} {text!r}: {done.returncode} {done.stderr}")
    return done.stdout


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def _child_of(pid: int) -> int:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                    return int(entry.name)
    raise ProcessLookupError(f"process {pid} has no child")


def _free_net(*taken: str) -> str:
    """The first three numbers of a private network that this machine does not use."""
    routes = json.loads(_run(["ip", "-j", "route"]) or "[]")
    used = {*taken, *(".".join(route["dst"].split(".")[:3]) for route in routes)}
    while (net := f"10.{random.randrange(64, 192)}.{random.randrange(1, 255)}") in used:
        pass
    return net
