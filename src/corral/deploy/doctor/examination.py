"""The whole examination, in an order in which each step has what it needs, within one time limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from corral.base.errors import CorralError
from corral.base.home import home_dir
from corral.base.ssh import Ssh
from corral.base.wording import counted
from corral.deploy.doctor.engine import check_runtime, judge_all_reduce, run_all_reduce
from corral.deploy.doctor.finding import Finding, Level, Pair, Report, fatal, ok, warning
from corral.deploy.doctor.judge import TMP, judge_answers, judge_facts, judge_model, judge_writing
from corral.deploy.doctor.network import judge_network, probe_network
from corral.deploy.doctor.readiness import judge_readiness
from corral.engines.runtimes.base import NodeSide, Runtime, make_runtime
from corral.plan.hardware.fabric import Fabric, choose_fabric
from corral.plan.hardware.survey import Asked, Here, NodeFacts, marked_folders
from corral.plan.hardware.survey import survey as survey_nodes
from corral.plan.models.store import already_here, check_access
from corral.plan.places import Storage, candidates, located

HERE = "here"
NODE_HOME = "~/.local/share/corral"  # where Corral lives on nodes that do not share this machine's files
PORTS_ASKED = 2  # for the network test, and for the all-reduce
WIDTH = 128  # hosts asked at the same time: most of what a thread does is wait
SURVEY_S = 9.0  # hung hosts cost this much, together; an ssh that does not connect gives up earlier
QUICK_S = 20.0
NETWORK_S = 30.0


@dataclass(frozen=True)
class Question:
    """What to examine."""

    hosts: tuple[str, ...] = ()  # none: this machine
    model: str | None = None
    runtime: str = "managed"
    runtime_options: Mapping[str, object] = field(default_factory=dict)
    interface: str | None = None
    hca: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)  # network variables that the user sets
    ports: tuple[int, ...] = (8000,)
    ports_needed: bool = False  # whether a taken port is fatal
    home: str | None = None  # Corral's home on the nodes
    storage: Storage = field(default_factory=Storage)  # where a profile says that models lie
    identity: str | None = None  # ssh -i
    config: str | None = None  # ssh -F
    quick: bool = False
    timeout_s: float = 60.0


Progress = Callable[[str], None]


def _silent(_: str) -> None:
    """For callers who show nothing."""


class _Examination:
    """One run: its findings so far, and the time that is left."""

    def __init__(self, question: Question, progress: Progress) -> None:
        self.question, self.progress = question, progress
        self.began = time.monotonic()
        self.hosts = question.hosts or (HERE,)
        connect_s = max(2, min(6, int(question.timeout_s / 3)))
        self.ssh: Ssh | Here = Ssh(connect_s, question.identity, question.config) if question.hosts else Here()
        self.findings: list[Finding] = []
        self.facts: list[NodeFacts] = []
        self.fabric: Fabric | None = None
        self.pairs: tuple[Pair, ...] = ()
        self.versions: dict[str, dict[str, str]] = {}
        self.model_path = ""  # where a node has the model
        self.shared = False  # whether the nodes see this machine's own files

    @property
    def left_s(self) -> float:
        return self.question.timeout_s - (time.monotonic() - self.began)

    def enough(self, what: str, least_s: float) -> bool:
        """Whether there is time for a step; a finding where there is not."""
        if self.left_s >= least_s:
            return True
        self.findings.append(warning(what, "not checked: the time limit was reached", "Allow more with --deadline."))
        return False

    def report(self) -> Report:
        order = {Level.FATAL: 0, Level.WARNING: 1, Level.OK: 2}
        findings = tuple(sorted(self.findings, key=lambda finding: order[finding.level]))
        took = time.monotonic() - self.began
        return Report(self.hosts, findings, tuple(self.facts), self.fabric, self.pairs, took, self.versions)

    # --- the steps

    def survey(self, models: tuple[str, ...]) -> None:
        question = self.question
        self.progress(f"asking {counted(len(self.hosts), 'node')}" if question.hosts else "looking at this machine")
        home = question.home or (NODE_HOME if question.hosts else str(home_dir()))
        shared_home = str(home_dir()) if question.hosts and not question.home else home  # where the nodes see it
        asked = Asked(
            disks=(home, TMP),
            write=tuple(dict.fromkeys((home, shared_home, TMP))),
            paths=models,
            ports=question.ports,
            free_ports=PORTS_ASKED,
            read=() if question.quick else models,
        )
        with marked_folders(
            [home_dir()] if question.hosts and home_dir().is_dir() else [], self._unwritable
        ) as marks:
            answers = self._ask(replace(asked, nonces=tuple(marks)))
        self.facts = [facts for facts in answers.values() if isinstance(facts, NodeFacts)]
        seen = [node.nonces.get(mark) == content for mark, content in marks.items() for node in self.facts]
        self.shared = bool(seen) and all(seen)
        self.findings += judge_answers(answers) if question.hosts else []
        if self.facts:
            self.findings += judge_facts(self.facts, question.ports, question.ports_needed)
            self.findings += judge_writing(self.facts, (shared_home if self.shared else home, TMP))
            self.findings += judge_readiness(self.facts, question.runtime)
        seen_at = [path for path in models if any(n.paths[path].exists for n in self.facts if path in n.paths)]
        self.model_path = seen_at[0] if seen_at else ""
        if self.model_path or (models and _is_path(question.model)):
            self.findings += judge_model(self.facts, self.model_path or models[0])

    def _unwritable(self, error: OSError) -> None:
        text = f"Corral's home on this machine cannot be written to: {home_dir()}: {error.strerror or error}"
        self.findings.append(fatal("folders", text, "Set CORRAL_HOME to a folder that can be, or free some space."))

    def _ask(self, asked: Asked) -> dict[str, NodeFacts | CorralError]:
        question = self.question
        waves = -(-len(self.hosts) // WIDTH)
        share = question.timeout_s * (0.8 if question.quick else 0.45)
        limit_s = max(2.0, min(QUICK_S if question.quick else SURVEY_S, share / waves))
        return survey_nodes(self.ssh, self.hosts, asked, limit_s, WIDTH)

    def network(self) -> None:
        try:
            self.fabric = choose_fabric(
                self.facts, self.question.interface, self.question.hca, dict(self.question.env)
            )
        except CorralError as error:
            self.findings.append(fatal("network", error.message, error.remedy))
            return
        if len(self.facts) > 1 or self.question.interface:
            address = ", ".join(dict.fromkeys(self.fabric.addresses.values())) if len(self.facts) == 1 else ""
            self.findings.append(ok("network", self.fabric.because + (f": {address}" if address else "")))
        self.findings += [warning("network", note, "See docs/doctor.md.") for note in self.fabric.notes]

    def engine(self) -> Runtime | None:
        self.progress("looking for the engine")
        try:
            runtime = self._runtime()
        except CorralError as error:
            self.findings.append(fatal("runtime", error.message, error.remedy))
            return None
        hosts = [node.host for node in self.facts]
        limit_s = self.left_s - 1 if self.question.quick else self.left_s * 0.6
        findings, self.versions = check_runtime(self.ssh, hosts, runtime, limit_s)
        self.findings += findings
        return runtime if len(self.versions) == len(hosts) else None

    def _runtime(self) -> Runtime:
        from corral.engines import PINNED_VERSION

        flavour = "cuda" if any(node.gpus for node in self.facts) else "cpu"
        home = self.question.home or (NODE_HOME if self.question.hosts else str(home_dir()))
        home = home.replace("~", self.facts[0].home, 1) if home.startswith("~") else home
        if self.question.home is None and self.shared:
            home = str(home_dir())
        return make_runtime(
            self.question.runtime, self.question.runtime_options, NodeSide(home, flavour, PINNED_VERSION)
        )

    def network_speed(self) -> None:
        assert self.fabric is not None
        count = len(self.facts)
        self.progress(f"measuring the network: {count * (count - 1) // 2} pairs")
        able = [node for node in self.facts if node.free_ports]
        result = probe_network(self.ssh, able, self.fabric, min(NETWORK_S, self.left_s - 1))
        findings, self.pairs = judge_network(result, self.fabric)
        self.findings += findings

    def all_reduce(self, runtime: Runtime) -> None:
        assert self.fabric is not None
        if len(self.facts[0].free_ports) < PORTS_ASKED:
            why = self.facts[0].errors.get("ports", "it named too few")
            text = f"{self.facts[0].host} has no free port for it: {why}"
            self.findings.append(warning("all-reduce", text, "Look at the node.", self.facts[0].host))
            return
        self.progress("running a small all-reduce in the engine")
        results = run_all_reduce(self.ssh, self.facts, self.fabric, runtime, self.left_s - 5)
        self.findings += judge_all_reduce(results, self.fabric)

    def hub(self) -> None:
        """Whether the model can be fetched from the hub, when it is not on disk."""
        reference = self.question.model
        if not reference or self.model_path or _is_path(reference):
            return
        try:
            source = located(reference, self.question.storage)
            if already_here(source) or source.kind != "hub":
                return
            self.progress(f"asking the hub about {source.repo}")
            error = _within(min(10.0, self.left_s), lambda: check_access(source))
        except CorralError as problem:
            self.findings.append(fatal("model", problem.message, problem.remedy))
            return
        if error is not None:
            self.findings.append(fatal("hub", error.message, error.remedy))
        else:
            self.findings.append(ok("hub", f"{source.repo} may be fetched"))


def _within(limit_s: float, task: Callable[[], None]) -> CorralError | None:
    """The task's error, or one for taking too long: libraries have longer limits of their own."""
    errors: list[CorralError | None] = []

    def work() -> None:
        try:
            task()
            errors.append(None)
        except CorralError as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(max(0.1, limit_s))
    return (
        errors[0] if errors else CorralError(f"the hub did not answer within {limit_s:.0f} s.", "Check the network.")
    )


def _is_path(model: str | None) -> bool:
    return (model or "").startswith(("/", "~", "."))


def model_paths(question: Question) -> tuple[str, ...]:
    """Where the nodes may have the model, the likeliest first."""
    model = question.model
    if not model or model.startswith(("/", "~")):
        return (model,) if model else ()
    try:
        source = located(model, question.storage)
    except CorralError:
        return ()
    here = already_here(source)
    there = candidates(source, question.storage, question.hosts) if question.hosts and source.kind == "hub" else []
    return tuple(dict.fromkeys([*([str(here)] if here else []), *there]))


def examine(question: Question, progress: Progress = _silent) -> Report:
    """All checks; ends within the question's limit even when nodes hang."""
    run = _Examination(question, progress)
    run.survey(model_paths(question))
    if not run.facts:
        return run.report()
    run.network()
    runtime = run.engine() if run.enough("runtime", 3) else None
    if question.quick:
        return run.report()
    run.hub()
    several = len(run.facts) > 1 and run.fabric is not None
    if several and run.enough("network", 5):
        run.network_speed()
    blocked = any(finding.what == "firewall" for finding in run.report().fatal)  # an all-reduce would only time out
    if several and runtime is not None and not blocked and run.enough("all-reduce", 15):
        run.all_reduce(runtime)
    return run.report()


def quick_check(question: Question, progress: Progress = _silent) -> Report:
    """What `corral up` checks first: ssh, Python, versions, ports, disk, interface."""
    return examine(replace(question, quick=True, timeout_s=min(question.timeout_s, QUICK_S)), progress)
