"""examples/kubernetes: fields that the APIs have, commands that parse and run, and pods that come and go.

The pods are local processes that run the containers' own commands. Where `kubernetes-validate` is installed, Jobs and
pods are checked with the schemas of Kubernetes too.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from accel_fsdp_tools.cli.main import build_parser, main
from accel_fsdp_tools.running.heartbeat import Beat, Heartbeat, get_directory
from tests.harness import find_free_port
from tests.launches import ROOT, assert_identical, compare, make_environment, read_starts, wait_for_step

FOLDER = ROOT / "examples" / "kubernetes"
pytestmark = pytest.mark.timeout(900)
NAMES = ["jobset.yaml", "pytorchjob.yaml"]

# The fields of the two APIs themselves; what lies below a `template` is Kubernetes' own.
_FIELDS: dict[str, set[str]] = {
    "JobSet": {"network", "failurePolicy", "replicatedJobs", "successPolicy", "suspend", "coordinator"},
    "JobSet.network": {"enableDNSHostnames", "subdomain", "publishNotReadyAddresses"},
    "JobSet.failurePolicy": {"maxRestarts", "restartStrategy", "rules"},
    "JobSet.failurePolicy.rules": {
        "name",
        "action",
        "onJobFailureReasons",
        "onJobFailureMessagePatterns",
        "targetReplicatedJobs",
    },
    "JobSet.replicatedJobs": {"name", "replicas", "template", "dependsOn", "groupName"},
    "PyTorchJob": {"elasticPolicy", "nprocPerNode", "pytorchReplicaSpecs", "runPolicy"},
    "PyTorchJob.runPolicy": {
        "activeDeadlineSeconds",
        "backoffLimit",
        "cleanPodPolicy",
        "managedBy",
        "schedulingPolicy",
        "suspend",
        "ttlSecondsAfterFinished",
    },
    "PyTorchJob.pytorchReplicaSpecs": {"Master", "Worker"},
    "PyTorchJob.pytorchReplicaSpecs.Master": {"replicas", "restartPolicy", "template"},
    "PyTorchJob.pytorchReplicaSpecs.Worker": {"replicas", "restartPolicy", "template"},
}


def _load(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text())
    return loaded


def _list_pods(name: str) -> list[dict[str, Any]]:
    """The specs of the pods in a manifest."""
    spec = _load(name)["spec"]
    if name == "jobset.yaml":
        return [each["template"]["spec"]["template"]["spec"] for each in spec["replicatedJobs"]]
    return [each["template"]["spec"] for each in spec["pytorchReplicaSpecs"].values()]


def _get_container(pod: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod["containers"]
    assert isinstance(container, dict)
    return container


def _split(command: list[str]) -> tuple[list[str], list[str]]:
    """The arguments of `accel-fsdp`, and what it runs."""
    assert command[0] == "accel-fsdp"
    return command[1 : command.index("--")], command[command.index("--") + 1 :]


def _get_option(command: list[str], name: str) -> str:
    (value,) = [each.removeprefix(f"{name}=") for each in command if each.startswith(f"{name}=")]
    return value


# -- what is written ------------------------------------------------------------------------------------------------


def test_the_list_is_complete() -> None:
    assert sorted(path.name for path in FOLDER.iterdir()) == NAMES


def _check_fields(value: Any, path: str) -> None:
    for each in value if isinstance(value, list) else [value]:
        assert not isinstance(each, dict) or path not in _FIELDS or set(each) <= _FIELDS[path], path
        for key, inner in each.items() if isinstance(each, dict) and path in _FIELDS else ():
            _check_fields(inner, f"{path}.{key}")


@pytest.mark.parametrize("name", NAMES)
def test_fields_are_those_of_the_api(name: str) -> None:
    manifest = _load(name)
    version, kind = {
        "jobset.yaml": ("jobset.x-k8s.io/v1alpha2", "JobSet"),
        "pytorchjob.yaml": ("kubeflow.org/v1", "PyTorchJob"),
    }[name]
    assert (manifest["apiVersion"], manifest["kind"]) == (version, kind)
    assert set(manifest) == {"apiVersion", "kind", "metadata", "spec"}
    _check_fields(manifest["spec"], kind)
    if name == "pytorchjob.yaml":
        assert all(_get_container(pod)["name"] == "pytorch" for pod in _list_pods(name))


@pytest.mark.parametrize("name", NAMES)
def test_jobs_and_pods_are_those_of_kubernetes(name: str) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for pod in _list_pods(name):
        meta = {"metadata": {"name": "any"}}
        validate.validate({"apiVersion": "v1", "kind": "Pod", **meta, "spec": pod}, "1.33", strict=True)
    if name == "jobset.yaml":
        for each in _load(name)["spec"]["replicatedJobs"]:
            validate.validate(
                {"apiVersion": "batch/v1", "kind": "Job", **meta, **each["template"]}, "1.33", strict=True
            )


def test_rules_of_the_jobset_act_on_our_exit_codes() -> None:
    """Kubernetes words the message of a failed Job so, and a JobSet has nothing but that to tell rules apart by."""
    spec = _load("jobset.yaml")["spec"]
    (job,) = spec["replicatedJobs"]
    causes = []
    for number, rule in enumerate(job["template"]["spec"]["podFailurePolicy"]["rules"]):
        assert rule["action"] == "FailJob"
        cause = rule["onExitCodes"]["values"][0] if "onExitCodes" in rule else rule["onPodConditions"][0]["type"]
        what = (
            f"Container trainer for pod a/b failed with exit code {cause}" if isinstance(cause, int) else "Pod a/b has"
        )
        causes.append((cause, f"{what} matching FailJob rule at index {number}"))
    actions = {}
    for cause, message in causes:
        for rule in spec["failurePolicy"]["rules"]:
            assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
            if any(re.search(pattern, message) for pattern in rule["onJobFailureMessagePatterns"]):
                actions[cause] = rule["action"]
                break
    free = "RestartJobSetAndIgnoreMaxRestarts"
    assert actions == {75: free, "DisruptionTarget": free, 69: "FailJobSet"}


@pytest.mark.parametrize("name", NAMES)
def test_commands_parse_and_fit_together(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.commands.launch import launch_command_parser

    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import finetune_lm

    for pod in _list_pods(name):
        container = _get_container(pod)
        own, launch = _split(container["command"])
        parsed = build_parser().parse_args([*own, "--", *launch])
        assert parsed.command == launch
        assert launch[:2] == ["accelerate", "launch"]
        accelerate = launch_command_parser().parse_args([re.sub(r"\$\(\w+\)", "1", each) for each in launch[2:]])
        assert (ROOT / accelerate.config_file).exists()
        assert (ROOT / accelerate.training_script).exists()
        monkeypatch.setattr(sys, "argv", ["finetune_lm.py", *accelerate.training_script_args])
        script = finetune_lm.parse_args()
        assert parsed.root == script.output_dir / "checkpoints"
        assert parsed.grace < pod["terminationGracePeriodSeconds"]

        probe = container["livenessProbe"]
        health = build_parser().parse_args(probe["exec"]["command"][1:])
        assert health.root == parsed.root
        assert health.this_host
        assert health.max_age > script.hang_limit, "the watchdog comes first: it restarts in place"
        mounted = [each["mountPath"] for each in container["volumeMounts"]]
        assert any(parsed.root.is_relative_to(path) for path in mounted)
        assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}


@pytest.mark.parametrize("name", NAMES)
def test_probes_run_on_a_real_run(uninterrupted: Path, tmp_path: Path, name: str) -> None:
    for pod in _list_pods(name)[:1]:
        program, *command = _get_container(pod)["livenessProbe"]["exec"]["command"]
        assert program == "accel-fsdp"

        def probe(root: Path, command: list[str] = command) -> int:
            return main([str(root) if each == "/runs/finetune/checkpoints" else each for each in command])

        assert probe(uninterrupted / "checkpoints") == 0  # over
        beat = Heartbeat(tmp_path, Beat.begin(0, 1, "run", 1))
        beat.tell_phase("step", None)
        path = get_directory(tmp_path) / "rank_00000.json"
        deadline = time.monotonic() + 10
        while not (path.exists() and b'"step"' in path.read_bytes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(1.2)  # the last write
        assert probe(tmp_path) == 0
        os.utime(path, (path.stat().st_mtime - 700,) * 2)
        assert probe(tmp_path) == 4
        beat.finish("finished")


# -- pods that come and go ------------------------------------------------------------------------------------------


@contextmanager
def _pods(name: str, output: Path) -> Iterator[Any]:
    """A function that starts the container of a pod, by the pod's number."""
    pods, port, folder = _list_pods(name), find_free_port(), output.parent
    for program, module in (
        ("accel-fsdp", "accel_fsdp_tools.cli"),
        ("accelerate", "accelerate.commands.accelerate_cli"),
    ):
        (folder / program).write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        (folder / program).chmod(0o755)
    started: list[subprocess.Popen[str]] = []

    def start(number: int, *options: str) -> subprocess.Popen[str]:
        command = _get_container(pods[min(number, len(pods) - 1)])["command"]
        values = {
            "JOB_COMPLETION_INDEX": str(number),
            "PET_NODE_RANK": str(number),
            "PET_NNODES": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        here = {
            "finetune-node-0-0.finetune": "127.0.0.1",
            "=29500": f"={port}",
            "=16": "=2",
            "fsdp2_2nodes": "fsdp2_cpu",
            "/runs/finetune": str(output),
            "read_timeout=300": f"read_timeout=300,is_host={int(number == 0)}",  # both are 127.0.0.1
        }
        words = [re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], each) for each in command]
        for before, after in here.items():
            words = [each.replace(before, after) for each in words]
        log = (folder / f"pod_{number}.log").open("a")
        process = subprocess.Popen(
            [*words, "--model", "tiny", *options],
            cwd=ROOT,
            env=make_environment(PATH=f"{folder}:{os.environ['PATH']}"),
            stdout=log,
            stderr=log,
            text=True,
        )
        log.close()
        started.append(process)
        return process

    try:
        yield start
    finally:
        for process in started:
            if process.poll() is None:
                process.terminate()
        for process in started:
            process.wait(60)


LONG = ["--steps", "120", "--save-every", "20", "--samples", "400"]


@pytest.mark.matrix
def test_pods_that_are_drained_go_on_elsewhere(uninterrupted: Path, tmp_path: Path) -> None:
    """All pods of the JobSet are evicted, and created again."""
    output = tmp_path / "run"
    with _pods("jobset.yaml", output) as start:
        pods = [start(number, "--fail-at-step", "10", "--fail-how", "signal") for number in (0, 1)]
        assert [pod.wait(600) for pod in pods] == [75, 75], _read_logs(tmp_path)
        pods = [start(number) for number in (0, 1)]
        assert [pod.wait(600) for pod in pods] == [0, 0], _read_logs(tmp_path)
    assert_identical(uninterrupted, output)
    assert len(read_starts(output)) == 2


@pytest.mark.matrix
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_pod_that_is_lost_is_waited_for(tmp_path: Path, how: signal.Signals) -> None:
    """The PyTorchJob starts one pod again; the launcher of the other one has waited for it."""
    with _pods("pytorchjob.yaml", tmp_path / "whole") as start:
        pods = [start(number, *LONG) for number in (0, 1)]
        assert [pod.wait(600) for pod in pods] == [0, 0], _read_logs(tmp_path)
    output = tmp_path / "run"
    with _pods("pytorchjob.yaml", output) as start:
        pods = [start(number, *LONG) for number in (0, 1)]
        wait_for_step(output, 30)
        _end(pods[1], how)
        assert pods[1].wait(200) == (75 if how == signal.SIGTERM else -signal.SIGKILL)
        pods[1] = start(1, *LONG)
        assert [pod.wait(600) for pod in pods] == [0, 0], _read_logs(tmp_path)
    result = compare(tmp_path / "whole", output)
    assert result.returncode == 0, result.stdout
    first, *others = read_starts(output)
    assert first == 0
    assert others == ([20] if how == signal.SIGKILL else others[:1])
    assert others[0] >= 20


def _end(pod: subprocess.Popen[str], how: signal.Signals) -> None:
    below = psutil.Process(pod.pid).children(recursive=True) if how == signal.SIGKILL else []
    pod.send_signal(how)
    for process in below:
        process.kill()


def _read_logs(folder: Path) -> str:
    return "".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in sorted(folder.glob("pod_*.log")))
