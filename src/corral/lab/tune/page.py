"""A tuning run for people: lines for the terminal, and one HTML file.

The result of a run as a profile: what was tuned as keys, what is known about it as comments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from corral.deploy.deployment.start_times import duration
from corral.deploy.profile.drafting import as_toml
from corral.deploy.targets.base import target_class
from corral.lab.report.page import cards, document, table, verdict_box
from corral.lab.report.tables import table_lines
from corral.lab.report.text import figure
from corral.lab.tune.knobs import choice_words
from corral.lab.tune.objective import Distance, distance
from corral.lab.tune.race import KnobFinding, RaceEnd, RaceResult, of_race
from corral.lab.tune.random_search import RandomFound, random_found
from corral.lab.tune.store import TuneRun
from corral.lab.tune.trials import Trial
from corral.lab.tune.tuner import settings_found


def sentence(found: RaceResult) -> str:
    """The result in one sentence."""
    match found.outcome:
        case RaceEnd.BETTER if found.reference.choices:
            more = f" {found.finalist}: {found.gain} over that." if found.best != found.reference else ""
            return f"The base does not start, and this does: {found.reference}.{more}"
        case RaceEnd.BETTER:
            return f"{found.finalist}: {found.gain} over the base."
        case RaceEnd.NOTHING_WORKED:
            return "None of the settings tried could be measured."
        case RaceEnd.UNFINISHED if found.gave_up:
            return f"{found.finalist} worked at first and did not start again in the final; the base stays."
        case RaceEnd.UNFINISHED if not found.finalist.choices:
            return "The budget ran out before anything was compared with the base. Raise --budget."
        case RaceEnd.UNFINISHED:
            return (
                f"The budget ran out before {found.finalist} was compared with the base in a final; the base stays."
            )
    if found.gain is None:
        return "No difference: nothing tried was better than the base."
    return f"No difference: {found.finalist} against the base is {found.gain}, an interval that includes zero."


def _anchor(found: RaceResult) -> str:
    return "the plan's own flags" if found.anchor.choices else "the base"


def _random_sentence(found: RaceResult, random: RandomFound) -> str:
    """How random search of equal time compares."""
    head = f"random search, {random.draws} draws in {duration(random.spent_s)}: {random.best}"
    if random.best == found.best:
        return f"{head}, the same choice"
    return f"{head}; {found.best} over it: {random.gain}" if random.gain else f"{head}; the two never met"


def _finding_row(finding: KnobFinding) -> list[str]:
    untold = (
        f"failed: {finding.why}" if finding.why else "nothing to compare with" if finding.measured else "not tried"
    )
    effect = str(finding.gain) if finding.gain else untold
    return [choice_words(finding.knob, finding.value), effect, finding_word(finding)]


def finding_word(finding: KnobFinding) -> str:
    """What a value did, in a word."""
    gain = finding.gain
    if gain is None:
        return "-"
    return "helps" if gain.low > 0 else "hurts" if gain.high < 0 else "makes no measurable difference"


def _trial_row(number: int, trial: Trial) -> list[str]:
    score = figure(trial.score) if trial.score else "-"
    return [str(number), trial.purpose.value, str(trial.setup), score, duration(trial.took_s), trial.why]


def tune_lines(run: TuneRun, trials: Sequence[Trial], found: RaceResult, columns: int | None) -> Iterator[str]:
    """The report for a terminal."""
    spec = run.spec
    yield f"{spec.model}: {spec.objective.words}"
    yield sentence(found)
    far = distance(spec.objective, found, trials)
    if far is not None:
        yield f"{found.best} reaches {far.words}"
    yield ""
    yield from table_lines(
        ["SETTING", f"ALONE, OVER {_anchor(found).upper()}", ""], [*map(_finding_row, found.findings)], None, columns
    )
    if random := random_found(found.best, trials):
        yield _random_sentence(found, random)
    if found.left_out:
        yield f"not tried, for lack of time: {'; '.join(one.beside(found.anchor) for one in found.left_out)}"
    yield ""
    spent, noise = duration(found.spent_s), f"{found.noise:.1%}"
    yield f"{len(of_race(trials))} trials in {spent}; two starts of one setup differ by {noise} (standard deviation)"
    if found.outcome is RaceEnd.BETTER:
        yield f"use it: corral up --tuned {run.name}"
    elif found.outcome is RaceEnd.UNFINISHED and not found.gave_up:
        yield f"go on: corral tune {run.name} --budget {duration(2 * spec.race.budget_s).replace(' ', '')}"


def _far_cards(far: Distance | None) -> list[tuple[str, str]]:
    if far is None:
        return []
    hardware = [("of the hardware's roofline", f"{far.of_hardware:.0%}")] if far.of_hardware else []
    return [*hardware, ("of the plan's prediction", f"{far.of_planned:.0%}")]


def html_page(run: TuneRun, trials: Sequence[Trial], found: RaceResult) -> str:
    """One self-contained file."""
    spec = run.spec
    kind = {RaceEnd.BETTER: "valid", RaceEnd.NO_DIFFERENCE: "valid"}.get(found.outcome, "caution")
    random = random_found(found.best, trials)
    best = max((one.score for one in trials if one.setup == found.best and one.score), default=0.0)
    body = [
        f"<h1>Tuning {escape(spec.model)}</h1>",
        f'<p class="sub">{escape(spec.objective.words)}</p>',
        verdict_box(kind, sentence(found), []),
        cards(
            [
                (f"best, {spec.objective.unit}", figure(best)),
                ("gain", f"{found.gain.value:+.1%}" if found.gain else "-"),
                ("trials", str(len(of_race(trials)))),
                ("time", duration(found.spent_s)),
                ("noise between starts", f"{found.noise:.1%}"),
                *_far_cards(distance(spec.objective, found, trials)),
            ]
        ),
        f"<h2>Settings, each alone against {_anchor(found)}</h2>",
        table(["setting", "gain (95%)", ""], [*map(_finding_row, found.findings)], "facts"),
        *([f"<p>{escape(_random_sentence(found, random))}</p>"] if random else []),
        "<h2>All trials</h2>",
        table(["", "stage", "setup", spec.objective.unit, "took", ""],
              [_trial_row(n + 1, one) for n, one in enumerate(trials)], "facts"),
    ]  # fmt: skip
    return document(f"Tuning {spec.model}", body)


def profile_text(run: TuneRun, trials: Sequence[Trial], found: RaceResult) -> str:
    """A whole profile; `corral up --on NAME` starts the setup that the run found best."""
    spec = run.spec
    fixed, arguments = settings_found(run)
    goal = spec.request.goal
    tables: dict[str, dict[str, object]] = {
        "defaults": {"model": spec.model, "context": goal.context, "concurrency": goal.concurrency, "set": fixed},
        "engine": {"args": list(arguments), "env": dict(spec.request.extra_env)},
        "runtime": {}
        if spec.request.runtime == "managed"
        else {"name": spec.request.runtime, **spec.request.runtime_options},
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
    if not target_class(spec.request.target).HERE:
        yield f"It ran on {spec.request.target}: add the keys of that target, or give its options beside --on."
