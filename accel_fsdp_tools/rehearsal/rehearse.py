"""Run a script straight through, then killed and resumed, and judge what its ranks have recorded.

Three starts suffice where all is well: a run without a break and without the ordered save; a run that saves and is
killed, which has to be the same up to there; and its resume, which has to be the same from there on. Only where
something differs a fourth one, without a break but with the save, tells apart what does not repeat itself, what the
save has changed, and what the resume has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from .causes import Cause, explain_elastic, explain_resume, list_divergent, list_inexact
from .comparing import Difference, compare
from .elastic import compare_elastic
from .launching import Launch, launch
from .orders import VARIABLE, Orders, find_records
from .plan import Plan
from .records import Attempt, read_attempt
from .report import RehearsalReport, RunFacts, Verdict
from .run_causes import explain_error, explain_save, explain_unrepeatable

Tell = Callable[[str], None]

STRAIGHT, KILLED, RESUMED, REPEAT = "straight", "killed", "resumed", "repeat"


def rehearse(plan: Plan, folder: Path, tell: Tell = lambda text: None) -> RehearsalReport:
    """Carry a plan out, with everything that the runs write in `folder`, which is new or empty.

    Args:
        tell: is told what happens, for people who wait.

    Raises:
        UsageError: the command cannot be started.
    """
    return _Rehearsal(plan, folder, tell).carry_out()


class _Stop(Exception):  # noqa: N818
    """A run has not done what was ordered: the report says what is missing."""

    def __init__(self, report: RehearsalReport) -> None:
        self.report = report


class _Rehearsal:
    def __init__(self, plan: Plan, folder: Path, tell: Tell) -> None:
        self._plan, self._folder, self._tell = plan, folder, tell
        self._runs: list[RunFacts] = []
        self._attempts: dict[str, Attempt] = {}

    def carry_out(self) -> RehearsalReport:
        try:
            straight = self._run_straight(STRAIGHT, save_at=None)
            killed, resumed = self._run_broken()
        except _Stop as stop:
            return stop.report
        begun = compare(straight, killed)
        compare_resumed = compare if self._plan.elastic is None else self._compare_elastic
        differences = compare_resumed(straight, resumed)
        if not begun and not differences:
            return self._praise(straight, resumed)
        try:
            repeat = self._run_straight(REPEAT, save_at=self._plan.save_at)
        except _Stop as stop:
            return stop.report
        return self._judge(straight, killed, resumed, repeat, differences)

    def _compare_elastic(self, straight: Attempt, resumed: Attempt) -> list[Difference]:
        return compare_elastic(straight, resumed, tolerance=self._plan.tolerance)

    # -- runs -------------------------------------------------------------------------------------------------

    def _run_straight(self, name: str, *, save_at: int | None) -> Attempt:
        orders = self._order(name, save_at=save_at, kill_rank=self._plan.kill_rank)  # so that it is checked at once
        saved = "" if save_at is None else f", saved at step {save_at}"
        done = self._start(orders, self._plan.command, f"{self._plan.steps} steps without a break{saved}")
        attempt = self._read(orders, name, done)
        if not attempt.has_ended:
            raise _Stop(self._explain_failure(name, attempt, done))
        return attempt

    def _run_broken(self) -> tuple[Attempt, Attempt]:
        plan = self._plan
        orders = self._order("broken", save_at=plan.save_at, kill_at=plan.kill_at, kill_rank=plan.kill_rank)
        who = "all ranks" if plan.kill_rank is None else f"rank {plan.kill_rank}"
        done = self._start(orders, plan.command, f"saved at step {plan.save_at}, {who} killed at step {plan.kill_at}")
        killed = self._read(orders, KILLED, done)
        if not orders.marker.exists():
            raise _Stop(self._explain_failure(KILLED, killed, done))
        resumed = read_attempt(Path(orders.folder), RESUMED)
        if resumed.ranks and plan.elastic is None:  # the launcher has restarted the script by itself
            self._note(RESUMED, resumed, done)
        else:
            for path in find_records(Path(orders.folder), RESUMED).values():  # restarted, on as many ranks
                path.unlink()
            done = self._start(orders, plan.resume_command, "started again")
            resumed = self._read(orders, RESUMED, done)
        if not resumed.has_ended:
            raise _Stop(self._explain_failure(RESUMED, resumed, done))
        if not resumed.begin or not resumed.begin["is_resumed"]:
            raise _Stop(self._explain_fresh_start(resumed))
        return killed, resumed

    def _order(self, name: str, **orders: int | None) -> Orders:
        folder = self._folder / name
        folder.mkdir(parents=True)
        is_elastic = self._plan.elastic is not None
        return Orders(str(folder), name, self._plan.steps, is_elastic=is_elastic, **orders)

    def _start(self, orders: Orders, command: Sequence[str], what: str) -> Launch:
        self._tell(f"{orders.attempt}: {what} ...")
        log = Path(orders.folder) / f"{orders.attempt}.log"
        return launch(command, {VARIABLE: orders.to_text()}, log, timeout_s=self._plan.timeout_s)

    def _read(self, orders: Orders, name: str, done: Launch) -> Attempt:
        attempt = read_attempt(Path(orders.folder), name)
        self._note(name, attempt, done)
        return attempt

    def _note(self, name: str, attempt: Attempt, done: Launch) -> None:
        self._attempts[name] = attempt
        self._runs.append(
            RunFacts(
                name,
                done.seconds,
                done.exit_code,
                str(done.log),
                attempt.first_step,
                attempt.last_step,
                attempt.world_size,
            )
        )

    # -- verdicts ---------------------------------------------------------------------------------------------

    def _report(self, verdict: Verdict, headline: str, **facts: object) -> RehearsalReport:
        return RehearsalReport(
            self._plan,
            verdict,
            headline,
            tuple(self._runs),
            attempts=dict(self._attempts),
            **facts,  # type: ignore[arg-type]
        )

    def _praise(self, straight: Attempt, resumed: Attempt) -> RehearsalReport:
        notes = [*_list_notes(straight, resumed), *list_inexact(resumed)]
        first, last = resumed.first_step + 1, self._plan.steps
        if self._plan.elastic is not None:
            headline = (
                f"steps {first} to {last} are those of the run without a break, as far as they can be on "
                f"{resumed.world_size} rank(s) instead of {straight.world_size}"
            )
            return self._report(Verdict.CONSISTENT, headline, notes=notes)
        headline = f"steps {first} to {last} are bit for bit those of the run without a break"
        return self._report(Verdict.EXACT, headline, notes=notes)

    def _judge(
        self,
        straight: Attempt,
        killed: Attempt,
        resumed: Attempt,
        repeat: Attempt,
        differences: Sequence[Difference],
    ) -> RehearsalReport:
        """Something differs; `repeat` did what `killed` did, only longer."""
        notes = _list_notes(straight, resumed)
        for first, second in ((repeat, killed), (straight, repeat)):
            found = compare(first, second)
            if not found:
                continue
            compared = (first.name, second.name)
            # Two runs that saved agree up to the kill, and the one that did not save differs from them.
            is_from_save = first is straight and self._plan.save_at < found[0].step <= self._plan.kill_at
            if is_from_save:
                headline = f"the run changes when a checkpoint is saved: {found[0].describe(compared)}"
                return self._report(
                    Verdict.DIFFERENT,
                    headline,
                    cause=explain_save(),
                    differences=found,
                    compared=compared,
                    notes=notes,
                )
            return self._report(
                Verdict.UNREPEATABLE,
                f"two runs without a break already differ: {found[0].describe(compared)}",
                cause=explain_unrepeatable(found),
                differences=found,
                compared=compared,
                notes=notes,
            )
        if not differences:
            return self._report(
                Verdict.UNREPEATABLE,
                "the killed run differed from the run without a break, and a third one did not: it is not always so",
                cause=explain_unrepeatable(compare(straight, killed)),
                differences=compare(straight, killed),
                compared=(STRAIGHT, KILLED),
                notes=notes,
            )
        return self._report(
            Verdict.DIFFERENT,
            f"the resumed run differs: {differences[0].describe((STRAIGHT, RESUMED))}",
            cause=(explain_resume if self._plan.elastic is None else explain_elastic)(differences, straight, resumed),
            differences=differences,
            notes=notes,
        )

    def _explain_failure(self, name: str, attempt: Attempt, done: Launch) -> RehearsalReport:
        verdict = Verdict.DOES_NOT_RESUME if name == RESUMED else Verdict.FAILED
        who = {
            STRAIGHT: "the run without a break",
            REPEAT: "the second run without a break",
            KILLED: "the run to be killed",
        }
        run = who.get(name, "the resumed run")
        error = attempt.find_error()
        if error is not None:
            headline, cause = f"{run} ended with {error['type']} after step {attempt.last_step}", explain_error(error)
        elif done.exit_code is None:
            headline = f"{run} had not ended after {self._plan.timeout_s:g} s (--timeout)"
            cause = Cause("hang", "the script hangs or is slow", "Look at its log; give it fewer steps or more time.")
        elif not attempt.ranks and done.exit_code != 0:
            headline = f"{run} ended with exit code {done.exit_code}, and recorded nothing"
            cause = Cause(
                "script-failed",
                "the script failed before it made a Checkpointer or a Trainer with FSDPCheckpointCallback",
                "The end of its log says where.",
            )
        elif not attempt.ranks:
            headline = f"{run} recorded nothing (exit code {done.exit_code})"
            cause = Cause(
                "no-records",
                "the script made neither a Checkpointer nor a Trainer with FSDPCheckpointCallback",
                "A rehearsal follows these; see the end of its log. The launcher has to pass the environment on.",
            )
        elif attempt.last_step == attempt.first_step:
            headline = f"{run} ended without an update (exit code {done.exit_code})"
            cause = Cause(
                "no-steps", "step() was never called", "Call checkpointer.step() after every optimizer.step()."
            )
        elif done.exit_code == 0:
            target = self._plan.kill_at if name == KILLED else self._plan.steps
            headline = f"{run} ended by itself after step {attempt.last_step}, before step {target}"
            cause = Cause("too-short", "the training is shorter than the rehearsal", "Ask for fewer --steps.")
        else:
            headline = f"{run} ended with exit code {done.exit_code} after step {attempt.last_step}"
            cause = Cause("script-failed", "the script failed", "Its log says where.")
        return self._report(verdict, headline, cause=cause, log_tail=done.read_tail())

    def _explain_fresh_start(self, resumed: Attempt) -> RehearsalReport:
        begin = resumed.begin or {}
        if begin.get("was_asked", True):
            title = "resume() was called and told to start anew (fresh=True, or another path), or found no checkpoint"
            advice = "Call checkpointer.resume() without arguments where a run is to go on."
        else:
            title, advice = "the script never asks for a resume", "Call checkpointer.resume() before the loop."
        return self._report(
            Verdict.DOES_NOT_RESUME,
            f"started again after the kill, the script began anew at step {resumed.first_step}",
            cause=Cause("never-resumes", title, advice),
        )


def _list_notes(straight: Attempt, resumed: Attempt) -> list[str]:
    notes = []
    following = straight.get_step(resumed.first_step + 1)
    if any(record["batches"] and record["batches"][0]["batch"] == 1 for record in following):
        notes.append(
            f"the checkpoint of step {resumed.first_step} lies at the end of an epoch: rehearse with another "
            "--save-at, too, so that the resume has to go on inside of one"
        )
    if not any(record["losses"] or record["backward_losses"] for record in straight.get_step(straight.first_step + 1)):
        notes.append("no loss was seen: pass it to step(loss=...), or use accelerator.backward")
    divergent = sorted({name for step in straight.ranks[0].steps for name in list_divergent(straight, step)})
    if divergent:
        notes.append(
            f"{', '.join(divergent[:4])}{' ...' if divergent[4:] else ''}: the ranks' copies differ, and where they do "
            "were not compared"
        )
    idle = [step for step, record in straight.ranks[0].steps.items() if not record["updates"]]
    if idle:
        notes.append(
            f"no optimizer made an update at step {', '.join(map(str, idle[:4]))}{', ...' if idle[4:] else ''}: a "
            "checkpoint there loses the gradients accumulated so far. Use accelerator.accumulate, or call step() only "
            "after an update (a gradient scaler that skips one is no fault)"
        )
    return notes
