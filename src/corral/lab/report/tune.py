"""Tuning runs for people: lines while trials run, the report for a terminal or as HTML, the result as a profile."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from html import escape

from corral.base.wording import duration
from corral.deploy.profile.drafting import as_toml
from corral.deploy.targets.keys import target_class
from corral.lab.report.bench import figure
from corral.lab.report.html import cards, document, table, verdict_box
from corral.lab.report.screen import LiveLines, tell
from corral.lab.report.tables import table_lines
from corral.lab.tune.knobs import choice_words
from corral.lab.tune.objective import Distance, distance
from corral.lab.tune.race import KnobFinding, RaceEnd, RaceResult
from corral.lab.tune.store import TuneRun
from corral.lab.tune.trials import Trial, TrialOrder
from corral.lab.tune.tuner import settings_found


class TrialLines:
    """One line for each trial: what runs, what came out, what is best, and the time left."""

    def __init__(self, quiet: bool) -> None:
        self._quiet, self._phase = quiet, ""
        self._live = LiveLines() if not quiet and sys.stderr.isatty() else None

    def say(self, text: str) -> None:
        if self._live:
            self._live.clear()
        if not self._quiet:
            tell(text, err=True)

    def begins(self, number: int, order: TrialOrder, left_s: float) -> None:
        self._phase = ""
        self.say(f"{number:3d}  {order.purpose.value:6}  {order.setup}  ({duration(left_s)} left)")

    def waits(self, who: str) -> None:
        tell(f"corral: waiting for {who}, which continues the same run", err=True)

    def phase(self, text: str) -> None:
        """Show what the trial is doing, on the last line of a terminal."""
        if text != self._phase and self._live:
            self._live.draw([f"{'':13}{text} …"])
        self._phase = text

    def ended(self, trial: Trial, so_far: RaceResult) -> None:
        result = f"{trial.score:,.1f}" if trial.score else f"failed: {trial.why}"
        leading = f"; ahead: {so_far.leader}" if so_far.leader.choices else ""
        self.say(f"             {result} in {duration(trial.took_s)}{leading}")


def sentence(result: RaceResult) -> str:
    """The result in one sentence."""
    match result.outcome:
        case RaceEnd.BETTER if result.reference.choices:
            more = f" {result.finalist}: {result.gain} over that." if result.best != result.reference else ""
            return f"The base does not start, and this does: {result.reference}.{more}"
        case RaceEnd.BETTER:
            return f"{result.finalist}: {result.gain} over the base."
        case RaceEnd.NOTHING_WORKED:
            return "None of the settings tried could be measured."
        case RaceEnd.UNFINISHED if result.gave_up:
            return f"{result.finalist} worked at first and did not start again in the final; the base stays."
        case RaceEnd.UNFINISHED if not result.finalist.choices:
            return "The budget ran out before anything was compared with the base. Raise --budget."
        case RaceEnd.UNFINISHED:
            return (
                f"The budget ran out before {result.finalist} was compared with the base in a final; the base stays."
            )
    if result.gain is None:
        return "No difference: nothing tried was better than the base."
    return f"No difference: {result.finalist} against the base is {result.gain}, an interval that includes zero."


def _anchor(result: RaceResult) -> str:
    return "the plan's own flags" if result.anchor.choices else "the base"


def _finding_row(finding: KnobFinding) -> list[str]:
    without_gain = (
        f"failed: {finding.why}" if finding.why else "nothing to compare with" if finding.measured else "not tried"
    )
    effect = str(finding.gain) if finding.gain else without_gain
    return [choice_words(finding.knob, finding.value), effect, finding_text(finding)]


def finding_text(finding: KnobFinding) -> str:
    """The effect of a value as text."""
    gain = finding.gain
    if gain is None:
        return "-"
    return "helps" if gain.low > 0 else "hurts" if gain.high < 0 else "makes no measurable difference"


def _trial_row(number: int, trial: Trial) -> list[str]:
    score = figure(trial.score) if trial.score else "-"
    return [str(number), trial.purpose.value, str(trial.setup), score, duration(trial.took_s), trial.why]


def tune_lines(run: TuneRun, trials: Sequence[Trial], result: RaceResult, columns: int | None) -> Iterator[str]:
    """The report for a terminal."""
    spec = run.spec
    yield f"{spec.model}: {spec.objective.words}"
    yield sentence(result)
    shares = distance(spec.objective, result, trials)
    if shares is not None:
        yield f"{result.best} reaches {shares.words}"
    yield ""
    yield from table_lines(
        ["SETTING", f"ALONE, OVER {_anchor(result).upper()}", ""],
        [*map(_finding_row, result.findings)],
        None,
        columns,
    )
    if result.left_out:
        yield f"not tried, for lack of time: {'; '.join(one.beside(result.anchor) for one in result.left_out)}"
    yield ""
    spent, noise = duration(result.spent_s), f"{result.noise:.1%}"
    yield f"{len(trials)} trials in {spent}; two starts of one setup differ by {noise} (standard deviation)"
    if result.outcome is RaceEnd.BETTER:
        yield f"use it: corral up --tuned {run.name}"
    elif result.outcome is RaceEnd.UNFINISHED and not result.gave_up:
        yield f"go on: corral tune {run.name} --budget {duration(2 * spec.race.budget_s).replace(' ', '')}"


def _bound_cards(shares: Distance | None) -> list[tuple[str, str]]:
    if shares is None:
        return []
    hardware = [("of the hardware's roofline", f"{shares.of_hardware:.0%}")] if shares.of_hardware else []
    return [*hardware, ("of the plan's prediction", f"{shares.of_planned:.0%}")]


def html_page(run: TuneRun, trials: Sequence[Trial], result: RaceResult) -> str:
    """One self-contained file."""
    spec = run.spec
    kind = {RaceEnd.BETTER: "valid", RaceEnd.NO_DIFFERENCE: "valid"}.get(result.outcome, "caution")
    best = max((one.score for one in trials if one.setup == result.best and one.score), default=0.0)
    body = [
        f"<h1>Tuning {escape(spec.model)}</h1>",
        f'<p class="sub">{escape(spec.objective.words)}</p>',
        verdict_box(kind, sentence(result), []),
        cards(
            [
                (f"best, {spec.objective.unit}", figure(best)),
                ("gain", f"{result.gain.value:+.1%}" if result.gain else "-"),
                ("trials", str(len(trials))),
                ("time", duration(result.spent_s)),
                ("noise between starts", f"{result.noise:.1%}"),
                *_bound_cards(distance(spec.objective, result, trials)),
            ]
        ),
        f"<h2>Settings, each alone against {_anchor(result)}</h2>",
        table(["setting", "gain (95%)", ""], [*map(_finding_row, result.findings)], "facts"),
        "<h2>All trials</h2>",
        table(["", "stage", "setup", spec.objective.unit, "took", ""],
              [_trial_row(n + 1, one) for n, one in enumerate(trials)], "facts"),
    ]  # fmt: skip
    return document(f"Tuning {spec.model}", body)


def profile_text(run: TuneRun, trials: Sequence[Trial], result: RaceResult) -> str:
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
    lines = [f"# {line}" for line in _comments(run, trials, result)]
    for name, values in tables.items():
        lines_of_table = [f"{key} = {as_toml(value)}" for key, value in values.items() if value]
        lines += ["", f"[{name}]", *lines_of_table] if lines_of_table else []
    return "\n".join(lines) + "\n"


def _comments(run: TuneRun, trials: Sequence[Trial], result: RaceResult) -> Iterator[str]:
    """The findings of a run, one line each."""
    spec = run.spec
    yield f"`corral tune`, run {run.name}: {spec.objective.words}"
    yield sentence(result)
    if shares := distance(spec.objective, result, trials):
        yield f"The best setup reaches {shares.words}."
    for finding in result.findings:
        name = choice_words(finding.knob, finding.value)
        if finding.gain:
            yield f"  {name}: {finding.gain}, {finding_text(finding)}"
    if not target_class(spec.request.target).HERE:
        yield f"It ran on {spec.request.target}: add the keys of that target, or give its options beside --on."
