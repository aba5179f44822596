"""The result of a run as a profile: what was tuned as keys, what is known about it as comments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from corral.deploy.profile.drafting import as_toml
from corral.lab.tune.page import finding_word, sentence
from corral.lab.tune.race import RaceResult
from corral.lab.tune.roofline import distance
from corral.lab.tune.setups import choice_words
from corral.lab.tune.store import TuneRun
from corral.lab.tune.trials import Trial
from corral.lab.tune.tuner import settings_found


def profile_text(run: TuneRun, trials: Sequence[Trial], found: RaceResult) -> str:
    """A whole profile; `corral up --on NAME` starts the setup that the run found best."""
    spec = run.spec
    fixed, arguments = settings_found(run)
    goal = spec.wish.goal
    tables: dict[str, dict[str, object]] = {
        "defaults": {"model": spec.model, "context": goal.context, "concurrency": goal.concurrency, "set": fixed},
        "engine": {"args": list(arguments), "env": dict(spec.wish.extra_env)},
        "runtime": {} if spec.wish.runtime == "managed" else {"name": spec.wish.runtime, **spec.wish.runtime_options},
    }
    lines = [f"# {line}" for line in _known(run, trials, found)]
    for name, values in tables.items():
        said = [f"{key} = {as_toml(value)}" for key, value in values.items() if value]
        lines += ["", f"[{name}]", *said] if said else []
    return "\n".join(lines) + "\n"


def _known(run: TuneRun, trials: Sequence[Trial], found: RaceResult) -> Iterator[str]:
    """What the run says, one line each."""
    spec = run.spec
    yield f"`corral tune`, run {run.name}: {spec.objective.words}"
    yield sentence(found)
    if far := distance(spec.objective, found, trials):
        yield f"The best setup reaches {far.words}."
    for finding in found.findings:
        name = choice_words(finding.knob, finding.value)
        if finding.gain:
            yield f"  {name}: {finding.gain}, {finding_word(finding)}"
    if spec.wish.target != "local":
        yield f"It ran on {spec.wish.target}: add the keys of that target, or give its options beside --on."
