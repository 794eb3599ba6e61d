"""`accel-fsdp rehearse`: a script that resumes exactly is found exact, and what is wrong with another one is named."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import psutil
import pytest

from accel_fsdp_tools.cli.main import main
from accel_fsdp_tools.cli.rehearsal_text import format_rehearsal
from accel_fsdp_tools.errors import UsageError
from accel_fsdp_tools.rehearsal import causes, run_causes
from accel_fsdp_tools.rehearsal.comparing import ORDER, Thing, compare, find_shift
from accel_fsdp_tools.rehearsal.elastic import compare_elastic
from accel_fsdp_tools.rehearsal.launching import launch, set_num_processes
from accel_fsdp_tools.rehearsal.orders import VARIABLE, Orders, get_records_path, read_orders
from accel_fsdp_tools.rehearsal.page import make_page
from accel_fsdp_tools.rehearsal.plan import Plan
from accel_fsdp_tools.rehearsal.records import Attempt, RankRecords, read_attempt
from accel_fsdp_tools.rehearsal.rehearse import rehearse
from accel_fsdp_tools.rehearsal.report import RehearsalReport, Verdict

ROOT = Path(__file__).parent.parent
SCRIPTS = Path(__file__).parent / "rehearsal_scripts"
NUM_STEPS, SAVE_AT, KILL_AT = 8, 3, 5

# -- synthetic records ----------------------------------------------------------------------------------------------


def make_step(step: int, rank: int = 0) -> dict[str, Any]:
    """What a rank records of an update of two batches."""
    generators = {"python": f"p{step}", "torch": f"t{step}.{rank}"}
    numbers = range(2 * step - 2, 2 * step)
    return {
        "kind": "step",
        "step": step,
        "generators": {**generators, "torch": f"a{step}.{rank}"},
        "batches": [
            {
                "loader": 0,
                "use": "training",
                "digest": f"batch{each}.{rank}",
                "indices": each,
                "generators": generators,
                "samples": [f"{each}.{rank}"],
            }
            for each in numbers
        ],
        "inputs": [f"input{each}.{rank}" for each in numbers],
        "generators_after_forward": [generators, generators],
        "losses": [1.0 / step, float("nan")],
        "backward_losses": [0.5 / step, 0.5],
        "gradient_norms": [2.0],
        "updates": [
            {
                "optimizer": 0,
                "class": "AdamW",
                "is_prepared": True,
                "lrs": [0.1 / step],
                "num_states": 0 if step == 1 else 4,
                "gradients": f"g{step}",
                "norm": 2.0,
            }
        ],
        **({"models": [{"w": f"w{step}"}], "optimizers": [_make_optimizer(step)]} if rank == 0 else {}),
    }


def _make_optimizer(step: int) -> dict[str, str]:
    return {"state.w.exp_avg": f"e{step}", "param_groups.0.lr": f"lr{step}", "param_groups.0.eps": "eps"}


def make_attempt(name: str, first_step: int = 0, last_step: int = 12, num_ranks: int = 2) -> Attempt:
    """A run without any difference."""
    ranks = []
    for rank in range(num_ranks):
        begin: dict[str, Any] = {"kind": "begin", "step": first_step, "is_resumed": first_step > 0, "report": None}
        begin["setup"] = {"schedulers": 1, "registered": 0}
        begin["generators"] = {"python": f"p{first_step}", "torch": f"a{first_step}.{rank}"}
        if rank == 0:
            begin |= {"models": [{"w": f"w{first_step}"}], "optimizers": [_make_optimizer(first_step)]}
        steps = {step: make_step(step, rank) for step in range(first_step + 1, last_step + 1)}
        ranks.append(RankRecords(rank, begin, steps, end={"kind": "end"}))
    return Attempt(name, ranks)


def make_pair() -> tuple[Attempt, Attempt]:
    return make_attempt("straight"), make_attempt("resumed", 3)


def _change(step: dict[str, Any], thing: Thing) -> None:
    """Let one thing of an update be other."""
    update, batch = step["updates"][0], step["batches"][0]
    other = {"python": "x", "torch": "y"}
    changes: dict[Thing, Callable[[], Any]] = {
        Thing.NUM_BATCHES: lambda: (step["batches"].pop(), step["inputs"].pop()),
        Thing.INDICES: lambda: batch.update(indices=99),
        Thing.GENERATORS: lambda: batch.update(generators=other),
        Thing.BATCH: lambda: batch.update(digest="x"),
        Thing.INPUTS: lambda: step.update(inputs=["x", "y"]),
        Thing.GENERATORS_AFTER_FORWARD: lambda: step.update(generators_after_forward=[other, other]),
        Thing.NUM_UPDATES: lambda: step["updates"].clear(),
        Thing.LEARNING_RATE: lambda: update.update(lrs=[7.0]),
        Thing.LOSS: lambda: step.update(losses=[9.0, 9.0]),
        Thing.GRADIENTS: lambda: update.update(gradients="x"),
        Thing.GRADIENT_NORM: lambda: step.update(gradient_norms=[9.0]),
        Thing.PARAMETERS: lambda: step.update(models=[{"w": "x"}]),
        Thing.OPTIMIZER: lambda: step.update(optimizers=[{**_make_optimizer(step["step"]), "state.w.exp_avg": "x"}]),
        Thing.GENERATORS_AFTER: lambda: step.update(generators=other),
    }
    changes[thing]()


THINGS = [each for each in Thing if each not in (Thing.PARAMETERS_BEFORE, Thing.OPTIMIZER_BEFORE, Thing.SAMPLES)]


def test_equal_runs_have_no_difference() -> None:
    straight, resumed = make_pair()
    assert compare(straight, resumed) == []
    assert compare(straight, make_attempt("killed", last_step=5)) == []


@pytest.mark.parametrize("thing", THINGS, ids=lambda each: each.name.lower())
def test_each_thing_is_found_where_it_differs(thing: Thing) -> None:
    straight, resumed = make_pair()
    _change(resumed.ranks[0].steps[6], thing)
    found = compare(straight, resumed)
    assert (found[0].step, found[0].thing, found[0].rank) == (6, thing, 0)
    assert {each.step for each in found} == {6}


def test_the_cause_comes_before_the_effect() -> None:
    straight, resumed = make_pair()
    for thing in sorted(THINGS[1:], key=lambda each: (each is Thing.NUM_UPDATES, -ORDER[each])):
        _change(
            resumed.ranks[1 if thing is not Thing.PARAMETERS and thing is not Thing.OPTIMIZER else 0].steps[5], thing
        )
    _change(resumed.ranks[0].steps[6], Thing.NUM_BATCHES)
    found = [each.thing for each in compare(straight, resumed) if each.step == 5]
    assert found == sorted(found, key=lambda each: ORDER[each])
    assert found[0] is Thing.INDICES
    assert compare(straight, resumed)[0].step == 5


def test_the_beginning_is_compared_with_the_same_step() -> None:
    straight, resumed = make_pair()
    assert resumed.ranks[0].begin is not None
    resumed.ranks[0].begin["optimizers"][0].pop("state.w.exp_avg")
    [found] = compare(straight, resumed)
    assert (found.step, found.thing, found.names) == (4, Thing.OPTIMIZER_BEFORE, ("state.w.exp_avg",))
    assert causes.explain_resume([found], straight, resumed).code == "optimizer-not-restored"


CODES = {
    Thing.NUM_BATCHES: ("accumulation", "unsteady-batches"),
    Thing.INDICES: ("data-order", "unseeded-order"),
    Thing.GENERATORS: ("rng-not-restored", "unseeded-generators"),
    Thing.BATCH: ("data-generator", "unseeded-data"),
    Thing.INPUTS: ("inputs", "unseeded-inputs"),
    Thing.GENERATORS_AFTER_FORWARD: ("rng-not-restored", "unsteady-forward"),
    Thing.NUM_UPDATES: ("accumulation", "unsteady-updates"),
    Thing.LEARNING_RATE: ("learning-rate", "unsteady-rate"),
    Thing.LOSS: ("hidden-state", "non-deterministic-op"),
    Thing.GRADIENTS: ("gradients", "non-deterministic-op"),
    Thing.GRADIENT_NORM: ("gradients", "non-deterministic-op"),
    Thing.PARAMETERS: ("update", "non-deterministic-update"),
    Thing.OPTIMIZER: ("update", "non-deterministic-update"),
    Thing.GENERATORS_AFTER: ("rng-not-restored", "unsteady-draws"),
}


@pytest.mark.parametrize("thing", THINGS, ids=lambda each: each.name.lower())
def test_causes(thing: Thing) -> None:
    straight, resumed = make_pair()
    _change(resumed.ranks[0].steps[4], thing)
    found = compare(straight, resumed)
    codes = causes.explain_resume(found, straight, resumed).code, run_causes.explain_unrepeatable(found).code
    assert codes == CODES[thing]


def test_a_schedule_is_forgotten_where_nobody_restores_it() -> None:
    straight, resumed = make_pair()
    assert resumed.ranks[0].begin is not None
    resumed.ranks[0].begin["setup"]["schedulers"] = 0
    _change(resumed.ranks[0].steps[5], Thing.LEARNING_RATE)
    found = compare(straight, resumed)
    cause = causes.explain_resume(found, straight, resumed)
    assert cause.code == "scheduler-not-prepared"
    assert any("the first update after the resume still had the right one" in each for each in cause.evidence)
    resumed.ranks[0].begin["setup"]["restores_schedulers"] = True
    assert causes.explain_resume(found, straight, resumed).code == "learning-rate"


@pytest.mark.parametrize("shift", [3, 1, -2])
def test_shifted_data_is_recognised(shift: int) -> None:
    straight, resumed = make_pair()
    lines = {}
    for key in ("batches", "inputs"):
        lines[key] = [each for step in range(1, 13) for each in straight.ranks[1].steps[step][key]]
    for step, record in resumed.ranks[1].steps.items():
        at = 2 * (step - 1) + shift
        for key, line in lines.items():
            fill: Any = (
                {"digest": f"late{step}", "indices": -1, "generators": {}} if key == "batches" else f"late{step}"
            )
            record[key] = [copy.deepcopy(line[each]) if each < len(line) else fill for each in (at, at + 1)]
    found = compare(straight, resumed)
    assert (found[0].step, found[0].rank, found[0].thing) == (4, 1, Thing.INDICES)
    cause = causes.explain_resume(found, straight, resumed)
    assert cause.code == ("data-skipped-twice" if shift > 0 else "data-repeated")
    assert f"by {abs(shift)} batch(es)" in cause.title
    assert f"the batch of step 4 is what the run without a break saw at step {4 + shift // 2}" in cause.evidence


def test_data_that_is_nowhere_else_is_not_shifted() -> None:
    straight, resumed = make_pair()
    _change(resumed.ranks[0].steps[4], Thing.BATCH)
    assert find_shift(straight, resumed, 4, 0) is None


def test_an_optimizer_that_was_never_prepared_is_named() -> None:
    straight, resumed = make_pair()
    for attempt in (straight, resumed):
        for record in attempt.ranks[0].steps.values():
            record["updates"].append({**record["updates"][0], "class": "SGD", "is_prepared": False})
    resumed.ranks[0].steps[4]["updates"][1]["num_states"] = 0
    _change(resumed.ranks[0].steps[4], Thing.PARAMETERS)
    cause = causes.explain_resume(compare(straight, resumed), straight, resumed)
    assert cause.code == "optimizer-not-prepared"
    assert "(SGD)" in cause.title
    assert "the SGD had state of 4 parameter(s) without a break, of 0 after the resume" in cause.evidence[0]


def test_buffers_of_which_each_rank_has_its_own_are_named() -> None:
    """They have no fingerprint while they differ; after the resume, all ranks have the copy of one."""
    straight, resumed = make_pair()
    assert resumed.ranks[0].begin is not None
    straight.ranks[0].steps[3]["divergent"] = ["running_mean"]
    resumed.ranks[0].begin["models"][0]["running_mean"] = "x"
    found = compare(straight, resumed)
    assert found[0].thing is Thing.PARAMETERS_BEFORE
    assert causes.explain_resume(found, straight, resumed).code == "copies-differ"
    straight.ranks[0].steps[3]["divergent"] = []
    assert causes.explain_resume(found, straight, resumed).code == "parameters-not-restored"


def test_random_numbers_that_are_drawn_behind_the_save_are_told_from_a_seed_that_is_set_again() -> None:
    straight, resumed = make_pair()
    saved = straight.ranks[0].steps[3]["generators"]
    resumed.ranks[0].begin = {**(resumed.ranks[0].begin or {}), "generators": saved}
    for batch in resumed.ranks[0].steps[4]["batches"]:
        batch["generators"] = dict(saved)  # as the checkpoint has them; without a break they have gone on
    cause = causes.explain_resume(compare(straight, resumed), straight, resumed)
    assert cause.code == "draws-after-save"
    assert "(python, torch) are drawn between the save of step 3 and the next batch" in cause.title
    for batch in resumed.ranks[0].steps[4]["batches"]:
        batch["generators"] = {"python": "seeded", "torch": "again"}
    assert causes.explain_resume(compare(straight, resumed), straight, resumed).code == "rng-not-restored"


def test_elastic_runs_are_compared_by_what_all_ranks_do_together() -> None:
    straight, resumed = make_attempt("straight"), make_attempt("resumed", 3, num_ranks=1)
    for step in range(1, 13):
        for rank in straight.ranks:
            rank.steps[step]["losses"] = [1 / step]
    for step, record in resumed.ranks[0].steps.items():
        batches = [batch for rank in straight.ranks for batch in rank.steps[step]["batches"]]
        record.update(batches=copy.deepcopy(batches), losses=[1.001 / step])
    assert compare_elastic(straight, resumed, tolerance=0.01) == []
    found = compare_elastic(straight, resumed, tolerance=1e-6)
    assert (found[0].step, found[0].thing) == (4, Thing.LOSS)
    assert causes.explain_elastic(found, straight, resumed).code == "elastic-loss"
    resumed.ranks[0].steps[7]["batches"][0]["samples"] = ["other"]
    [found_samples] = compare_elastic(straight, resumed, tolerance=0.01)
    assert (found_samples.step, found_samples.thing) == (7, Thing.SAMPLES)
    assert found_samples.actual == "4, 3 of them the same"


# -- the ends ---------------------------------------------------------------------------------------------------------


def test_records_of_a_killed_rank_may_end_in_the_middle_of_a_line(tmp_path: Path) -> None:
    path = get_records_path(tmp_path, "killed", 0)
    path.write_text(json.dumps({"kind": "begin", "step": 0}) + "\n" + json.dumps(make_step(1)) + '\n{"kind": "st')
    attempt = read_attempt(tmp_path, "killed")
    assert (attempt.world_size, attempt.last_step, attempt.has_ended) == (1, 1, False)
    assert read_attempt(tmp_path, "resumed").ranks == []
    get_records_path(tmp_path, "resumed", 1).write_text("")  # rank 0 died before it wrote anything
    assert [each.rank for each in read_attempt(tmp_path, "resumed").ranks] == [0, 1]


def test_batches_of_an_evaluation_belong_to_no_update(tmp_path: Path) -> None:
    """One that follows the save is not made again by the resumed run."""
    step = make_step(4)
    other = {**step["batches"][0], "loader": 1, "digest": "x", "use": None}
    evaluation = [other, {**other, "use": "evaluation"}]
    for batches in (step["batches"], [*evaluation, *step["batches"]]):
        path = get_records_path(tmp_path, "straight", 0)
        path.write_text(json.dumps({"kind": "begin", "step": 3}) + "\n" + json.dumps({**step, "batches": batches}))
        assert read_attempt(tmp_path, "straight").ranks[0].steps[4]["batches"] == step["batches"]
    step["batches"][0]["use"] = "evaluation"  # a forward pass without gradients, and then one with
    get_records_path(tmp_path, "straight", 0).write_text(json.dumps(step))
    assert len(read_attempt(tmp_path, "straight").ranks[0].steps[4]["batches"]) == 2


def test_orders_travel_in_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from accel_fsdp_tools.recording import join

    monkeypatch.delenv(VARIABLE, raising=False)
    assert read_orders() is None
    assert join() is None
    orders = Orders(str(tmp_path), "broken", 8, save_at=3, kill_at=5)
    monkeypatch.setenv(VARIABLE, orders.to_text())
    assert read_orders() == orders
    assert orders.attempt == "killed"
    orders.marker.write_text("{}")
    assert orders.attempt == "resumed"
    monkeypatch.setenv(VARIABLE, "yes")
    with pytest.raises(UsageError, match="Unset it"):
        join()


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("accelerate launch train.py -n 1", "accelerate launch --num_processes 3 train.py -n 1"),
        (
            "accelerate launch --num_processes 2 --config_file c.yaml train.py --num_processes 7",
            "accelerate launch --num_processes 3 --config_file c.yaml train.py --num_processes 7",
        ),
        ("accelerate launch --num-processes=2 train.py", "accelerate launch --num_processes 3 train.py"),
        (
            "accelerate launch --num_machines 1 -m pkg.train --num_processes 7",
            "accelerate launch --num_processes 3 --num_machines 1 -m pkg.train --num_processes 7",
        ),
        ("torchrun --nproc_per_node=2 train.py", "torchrun --nproc-per-node 3 train.py"),
        (
            "python -m torch.distributed.run --nproc-per-node 2 train.py",
            "python -m torch.distributed.run --nproc-per-node 3 train.py",
        ),
        (
            "env A=1 python -m accelerate.commands.launch train.py",
            "env A=1 python -m accelerate.commands.launch --num_processes 3 train.py",
        ),
    ],
)
def test_another_number_of_processes(command: str, expected: str) -> None:
    assert set_num_processes(command.split(), 3) == expected.split()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Say how the script is launched"),
        (["--kill-at", "12", "--", "python", "x.py"], "the kill before the end"),
        (["--kill-at", "1", "--", "python", "x.py"], "the checkpoint has to come before the kill"),
        (["--elastic", "2:1", "--", "python", "x.py"], "whose number of processes it can set"),
        (["--elastic", "2:2", "--", "torchrun", "x.py"], "two different numbers"),
        (["--elastic-args", "--a 1", "--", "torchrun", "x.py"], "is for --elastic"),
        (["--", "no-such-launcher", "x.py"], "cannot be started"),
        (["--timeout", "-1", "--", "python", "x.py"], "give 0 or more"),
        (["--timeout", "0", "--", "python", "x.py"], "give more than 0"),
        (["--tolerance", "nan", "--", "python", "x.py"], "give 0 or more"),
        (["--html", str(ROOT), "--", "python", "x.py"], "cannot be written"),
        (["--html", str(ROOT / "LICENSE" / "a.html"), "--", "python", "x.py"], "cannot be written"),
        (["--dir", str(ROOT / "LICENSE" / "a"), "--", "python", "x.py"], "cannot be made"),
        (["--dir", str(ROOT), "--", "python", "x.py"], "wants a folder of its own"),
    ],
)
def test_mistakes_of_the_user(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rehearse", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_who_ends_a_rehearsal_ends_the_script(tmp_path: Path, number: int, exit_code: int) -> None:
    code = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(f'{{os.getpid()}}\\n'); time.sleep(60)"
    command = [sys.executable, "-m", "accel_fsdp_tools.cli", "rehearse", "--dir", str(tmp_path / "all")]
    process = subprocess.Popen([*command, "--", sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    with process:
        deadline = time.monotonic() + 30
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().endswith("\n"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        _, told = process.communicate(timeout=30)
    assert process.returncode == exit_code
    assert f"records and logs: {tmp_path / 'all'}" in told
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_a_run_that_hangs_is_ended(tmp_path: Path) -> None:
    done = launch([sys.executable, "-c", "import time; time.sleep(60)"], {}, tmp_path / "log", timeout_s=1)
    assert done.exit_code is None
    assert done.seconds < 30


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [str(value) for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "link", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [str(value) for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_no_other() -> None:
    straight, resumed = make_pair()
    _change(resumed.ranks[0].steps[5], Thing.LOSS)
    found = compare(straight, resumed)
    plan = Plan.make(["python", "<train>.py"], steps=12, kill_at=5)
    report = RehearsalReport(
        plan,
        Verdict.DIFFERENT,
        "it differs & that's it",
        (),
        cause=causes.explain_resume(found, straight, resumed),
        differences=found,
        attempts={"straight": straight, "killed": make_attempt("killed", last_step=5), "resumed": resumed},
    )
    page = _Page()
    text = make_page(report)
    page.feed(text)
    assert page.open == []
    assert page.links == []
    assert "&lt;train&gt;.py" in text
    assert text.count("<svg") == 4
    assert text.count('<rect class="first"') == 1
    assert text.count('<rect class="band"') == 1
    shown = format_rehearsal(report, None)
    assert "hidden" not in shown
    assert "likely cause: batch, parameters and random generators are the same" in shown
    json.dumps(report.to_dict(), allow_nan=False)


# -- real processes ---------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def _rehearse(
    folder: Path, *arguments: str, launcher: Sequence[str] = (), script: str = "train.py", **options: Any
) -> RehearsalReport:
    command = [sys.executable, *launcher, str(SCRIPTS / script), *arguments]
    plan = Plan.make(command, **{"steps": NUM_STEPS, "kill_at": KILL_AT, "timeout_s": 300.0, **options})
    return rehearse(plan, folder)


def _find_fault(folder: Path, fault: str) -> RehearsalReport:
    return _rehearse(folder / fault, "--fault", fault)


ACCELERATE = ("-m", "accelerate.commands.launch", "--config_file", str(SCRIPTS / "fsdp2_cpu.yaml"))
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def _use_fsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `accelerate launch` tells a script, for torchrun."""
    settings = {"VERSION": "2", "AUTO_WRAP_POLICY": "NO_WRAP", "STATE_DICT_TYPE": "SHARDED_STATE_DICT"}
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    for name, value in {**settings, "RESHARD_AFTER_FORWARD": "true", "CPU_RAM_EFFICIENT_LOADING": "false"}.items():
        monkeypatch.setenv(f"FSDP_{name}", value)


def test_a_script_that_resumes_exactly(tmp_path: Path) -> None:
    """From the command line, two ranks of FSDP, one of them killed; and the script's own folder stays as it is.

    An evaluation behind the save is not made again by the resumed run.
    """
    own, page = tmp_path / "own", tmp_path / "page.html"
    options = ["--steps", str(NUM_STEPS), "--kill-at", str(KILL_AT), "--kill-rank", "1", "--html", str(page), "--json"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "accel_fsdp_tools.cli", "rehearse", *options, "--dir", str(tmp_path / "all"), "--"),
            *(sys.executable, *ACCELERATE, str(SCRIPTS / "train.py"), "--root", str(own), "--accumulate", "2"),
            *("--evaluate-every", str(SAVE_AT)),
        ],
        cwd=tmp_path,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert (report["verdict"], report["first_difference"]) == ("exact", None)
    assert [each["name"] for each in report["runs"]] == ["straight", "killed", "resumed"]
    assert [each["first_step"] for each in report["runs"]] == [0, 0, SAVE_AT]
    assert [each["last_step"] for each in report["runs"]] == [NUM_STEPS, KILL_AT, NUM_STEPS]
    assert {each["world_size"] for each in report["runs"]} == {2}
    losses = [{point["step"]: point["loss"] for point in report["series"][name]} for name in ("straight", "resumed")]
    assert losses[1] == {step: losses[0][step] for step in range(SAVE_AT + 1, NUM_STEPS + 1)}
    assert len(set(losses[0].values())) == NUM_STEPS
    assert page.read_text().count("<svg") == 4
    assert not own.exists()
    assert not list((tmp_path / "all").glob("*/checkpoints"))
    assert (tmp_path / "all" / "straight" / "straight.log").exists()


FOUND = {
    "reseeded": (Verdict.DIFFERENT, Thing.GENERATORS_AFTER_FORWARD, "rng-not-restored"),
    "noisy-op": (Verdict.UNREPEATABLE, Thing.LOSS, "non-deterministic-op"),
    "own-generator": (Verdict.DIFFERENT, Thing.LOSS, "hidden-state"),
    "skipped-twice": (Verdict.DIFFERENT, Thing.NUM_BATCHES, "data-skipped-twice"),
    "skip-first-batches": (Verdict.DOES_NOT_RESUME, None, "data-skipped-twice"),
    "unprepared-optimizer": (Verdict.DIFFERENT, Thing.PARAMETERS, "optimizer-not-prepared"),
    "second-optimizer": (Verdict.DIFFERENT, Thing.PARAMETERS, "optimizer-not-prepared"),
    "unprepared-scheduler": (Verdict.FAILED, None, "scheduler-not-prepared"),
    "unprepared-loader": (Verdict.DIFFERENT, Thing.INPUTS, "loader-not-prepared"),
    "save-changes-model": (Verdict.DIFFERENT, Thing.LOSS, "save-changes-run"),
    "own-schedule": (Verdict.DIFFERENT, Thing.LEARNING_RATE, "scheduler-not-prepared"),
    "unseeded-data": (Verdict.UNREPEATABLE, Thing.BATCH, "unseeded-data"),
    "draws-after-save": (Verdict.DIFFERENT, Thing.GENERATORS, "draws-after-save"),
    "stateful-data": (Verdict.DIFFERENT, Thing.BATCH, "data-generator"),
    "never-resumes": (Verdict.DOES_NOT_RESUME, None, "never-resumes"),
    "never-steps": (Verdict.FAILED, None, "no-steps"),
    "too-short": (Verdict.FAILED, None, "too-short"),
    "crashes-after-resume": (Verdict.DOES_NOT_RESUME, None, "script-failed"),
    "no-checkpointer": (Verdict.FAILED, None, "no-records"),
}
_DEFAULT = ("reseeded", "noisy-op")


def _check_found(report: RehearsalReport, fault: str) -> None:
    verdict, thing, code = FOUND[fault]
    assert report.cause is not None
    found = report.differences[0] if report.differences else None
    assert (report.verdict, found and found.thing, report.cause.code) == (verdict, thing, code), format_rehearsal(
        report, None
    )
    if found is not None:
        assert found.step == (SAVE_AT + 1 if verdict is Verdict.DIFFERENT else 1)
    if verdict in (Verdict.DOES_NOT_RESUME, Verdict.FAILED) and fault != "never-resumes":
        assert report.log_tail or fault in ("never-steps", "no-checkpointer", "too-short")


def test_faults_are_named(tmp_path: Path) -> None:
    with ThreadPoolExecutor(len(_DEFAULT)) as pool:
        reports = pool.map(lambda fault: _find_fault(tmp_path, fault), _DEFAULT)
    for fault, report in zip(_DEFAULT, reports, strict=True):
        _check_found(report, fault)


@pytest.mark.matrix
@pytest.mark.parametrize("fault", [each for each in FOUND if each not in _DEFAULT])
def test_every_fault_is_named(tmp_path: Path, fault: str) -> None:
    _check_found(_find_fault(tmp_path, fault), fault)


@pytest.mark.matrix
@pytest.mark.timeout(900)
def test_a_trainer_that_resumes_exactly_and_one_that_never_does(tmp_path: Path) -> None:
    own = tmp_path / "own"
    exact = _rehearse(tmp_path / "a", "--output-dir", str(own), launcher=ACCELERATE, script="trainer.py")
    assert exact.verdict is Verdict.EXACT, format_rehearsal(exact, None)
    assert [each for each in own.rglob("*") if each.is_file()] == []
    arguments = ["--output-dir", str(own), "--fault", "never-resumes"]
    never = _rehearse(tmp_path / "b", *arguments, launcher=ACCELERATE, script="trainer.py")
    assert (never.verdict, never.cause and never.cause.code) == (Verdict.DOES_NOT_RESUME, "never-resumes")


@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kill_rank", [None, 1])
def test_a_launcher_that_restarts_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kill_rank: int | None
) -> None:
    _use_fsdp(monkeypatch)
    # Else the new ranks find the addresses of the dead ones in the launcher's store (torch 2.13).
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    report = _rehearse(tmp_path / "a", launcher=(*TORCHRUN, "--max-restarts", "2"), kill_rank=kill_rank)
    assert report.verdict is Verdict.EXACT, format_rehearsal(report, None)
    assert len({each.log for each in report.runs[1:]}) == 1  # one start was both
    assert report.runs[-1].exit_code == 0


@pytest.mark.matrix
@pytest.mark.timeout(900)
def test_saves_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _use_fsdp(monkeypatch)
    report = _rehearse(tmp_path / "a", "--async-save", launcher=TORCHRUN)
    assert report.verdict is Verdict.EXACT, format_rehearsal(report, None)


@pytest.mark.matrix
@pytest.mark.timeout(900)
def test_a_resume_on_another_number_of_ranks(tmp_path: Path) -> None:
    elastic = {"elastic": "2:1", "launcher": ACCELERATE, "tolerance": 0.6}
    same = _rehearse(tmp_path / "a", "--elastic", "exact", elastic_args=["--batch-size", "4"], kill_rank=1, **elastic)
    assert same.verdict is Verdict.CONSISTENT, format_rehearsal(same, None)
    assert [each.world_size for each in same.runs] == [2, 2, 1]
    refused = _rehearse(tmp_path / "b", **elastic)
    assert (refused.verdict, refused.cause and refused.cause.code) == (Verdict.DOES_NOT_RESUME, "elastic-refused")
    other = _rehearse(tmp_path / "c", "--elastic", "allow", **elastic)
    assert (other.verdict, other.cause and other.cause.code) == (Verdict.DIFFERENT, "elastic-samples")
