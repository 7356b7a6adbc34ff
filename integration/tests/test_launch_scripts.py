"""What launch/ gives to schedulers fits their schemas, and what they would run trains.

Scheduler's facts: PyTorchJob's CRD and webhook (kubeflow/training-operator, v1), SkyPilot's task
schema (sky/utils/schemas.py), and the options in sbatch's manual.
"""

import contextlib
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from integration.train.metrics import read_metrics
from testkit import run_python

SCRIPTS = Path(__file__).parents[1] / "launch"
ROOT = SCRIPTS.parents[1]
TINY = ["--model", "llama-tiny", "--system", "fsdp2", "--steps", "2"]
ENVIRONMENT = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

# A JSON schema, in Python's words: a type; a set of values; a list of one; a dict of fields, of
# which those with "!" are required; or {"*": of every field}.
SBATCH = set(
    re.findall(
        r"[\w-]+",
        """
        account array batch begin chdir cluster-constraint clusters comment constraint container
        contiguous core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline
        delay-boot dependency distribution error exclude exclusive export export-file
        extra-node-info get-user-env gid gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket
        gpus-per-task gres gres-flags hint hold ignore-pbs input job-name kill-on-invalid-dep
        licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus
        network nice no-kill no-requeue nodefile nodelist nodes ntasks ntasks-per-core
        ntasks-per-gpu ntasks-per-node ntasks-per-socket open-mode output overcommit oversubscribe
        parsable partition power prefer priority profile propagate qos quiet reboot requeue
        reservation signal sockets-per-node spread-job switches test-only thread-spec
        threads-per-core time time-min tmp tres-per-task uid use-min-nodes verbose wait
        wait-all-nodes wckey wrap
        """,
    )
)
CONTAINER = {
    "name!": {"pytorch"},  # the operator sets the environment of this one
    "image!": str,
    "command": [str],
    "args": [str],
    "env": [{"name!": str, "value": str}],
    "volumeMounts": [{"name!": str, "mountPath!": str, "subPath": str, "readOnly": bool}],
}
CLAIM = {"claimName!": str, "readOnly": bool}
REPLICAS = {
    "replicas!": int,
    "restartPolicy": {"Always", "OnFailure", "Never", "ExitCode"},
    "template!": {
        "metadata": dict,
        "spec!": {
            "containers!": [CONTAINER],
            "volumes": [{"name!": str, "persistentVolumeClaim": CLAIM}],
        },
    },
}
PYTORCHJOB = {
    "apiVersion!": {"kubeflow.org/v1"},
    "kind!": {"PyTorchJob"},
    "metadata!": {"name!": str, "namespace": str, "labels": {"*": str}},
    "spec!": {
        "runPolicy": {
            "activeDeadlineSeconds": int,
            "backoffLimit": int,
            "cleanPodPolicy": {"All", "Running", "None"},
            "managedBy": str,
            "schedulingPolicy": dict,
            "suspend": bool,
            "ttlSecondsAfterFinished": int,
        },
        "elasticPolicy": dict,
        "nprocPerNode": str,
        "pytorchReplicaSpecs!": {"Master!": REPLICAS, "Worker": REPLICAS},
    },
}
SKY = {
    "name": str,
    "workdir": str,
    "num_nodes": int,
    "resources": {
        **dict.fromkeys(["infra", "cloud", "region", "zone", "instance_type"], str),
        **dict.fromkeys(["cpus", "memory", "accelerators", "image_id"], str),
        "use_spot": bool,
        "disk_size": int,
        "job_recovery": str,
    },
    "envs": {"*": str},
    "secrets": {"*": str},
    "file_mounts": {"*": {"name": str, "source": str, "store": str, "mode": {"MOUNT", "COPY"}}},
    "setup": str,
    "run!": str,
    "service": dict,
    "volumes": dict,
    "config": dict,
}


def violations(value, schema, where="the file"):
    """Where a value leaves its schema."""
    match schema:
        case type():
            if type(value) is not schema:
                yield f"{where} is {value!r}, not {schema.__name__}"
        case set():
            if value not in schema:
                yield f"{where} is {value!r}, none of {sorted(schema)}"
        case [each]:
            if not isinstance(value, list):
                yield f"{where} is no list"
                return
            for index, item in enumerate(value):
                yield from violations(item, each, f"{where}[{index}]")
        case dict():
            if not isinstance(value, dict):
                yield f"{where} is no mapping"
                return
            known = {name.rstrip("!"): inner for name, inner in schema.items()}
            required = {name[:-1] for name in schema if name.endswith("!")}
            yield from (f"{where} lacks {name}" for name in sorted(required - value.keys()))
            for name, item in value.items():
                inner = known.get(name, known.get("*"))
                if inner is None:
                    yield f"{where} has no field {name}"
                else:
                    yield from violations(item, inner, f"{where}.{name}")


def directives(text):
    """The options of a batch script, as sbatch reads them: up to the first command."""
    found = {}
    for line in text.splitlines():
        if line.startswith("#SBATCH "):
            name, _, value = line.removeprefix("#SBATCH --").partition("=")
            found[name] = value
        elif line.strip() and not line.startswith("#"):
            return found
    return found


def run(words, **environment):
    """Run a command to its end in the root of the repository; it must succeed."""
    result = subprocess.run(
        words,
        env=ENVIRONMENT | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def run_on_each(hosts, tmp_path, words, environments):
    """Run a command on each host, with an environment for each, to their ends."""
    path = {"PATH": ENVIRONMENT["PATH"]}
    logs = [tmp_path / f"host{host}.log" for host in range(2)]
    processes = [
        hosts.start(host, words, logs[host], **path | environment)
        for host, environment in enumerate(environments)
    ]
    codes = [process.wait(120) for process in processes]
    assert codes == [0, 0], "\n".join(log.read_text() for log in logs)


def free_port():
    """One of 20000 to 29999, which the kernel gives to nobody by itself."""
    while True:
        port = random.randrange(20000, 30000)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return str(port)


def losses(out):
    return [(record.step, record.loss) for record in read_metrics(out)]


def agent(out, *options, **settings):
    """Runs the agent that torchrun.sh starts to its end, with its options as settings."""
    words = [word for name, value in settings.items() for word in (option_of(name), value)]
    words = ["-m", "integration.train.launch.agent", *words, "--", "--out", str(out), *options]
    return run_python(*words, timeout=120)


def option_of(variable):
    """The option of the agent that a variable of torchrun.sh gives."""
    return f"--{variable.lower().replace('_', '-')}"


def test_torchruns_variables_are_options_of_the_agent(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    given = {"HOSTS": "2", "RANKS": "8", "RENDEZVOUS": "node0:29500", "JOIN_TIMEOUT": "9"}
    given |= {"RESTARTS": "3", "JOB": "seven"}
    for settings in (given, {}):
        environment = {"PATH": f"{tmp_path}:{ENVIRONMENT['PATH']}"} | settings
        words = ["bash", str(SCRIPTS / "torchrun.sh"), "--out", "a folder"]
        output = subprocess.run(words, env=environment, check=True, capture_output=True, text=True)
        module, name, *options = output.stdout.splitlines()
        assert (module, name) == ("-m", "integration.train.launch.agent")
        assert options[-3:] == ["--", "--out", "a folder"]
        passed = dict(zip(options[:-3:2], options[1:-3:2], strict=True))
        assert passed.keys() == {option_of(variable) for variable in given}
        if settings:
            assert passed == {option_of(variable): value for variable, value in given.items()}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Losses by torchrun.sh, on one host with two ranks."""
    out = tmp_path_factory.mktemp("torchrun") / "run"
    command = [str(SCRIPTS / "torchrun.sh"), "--out", str(out), *TINY]
    run(command, RANKS="2")
    assert len(losses(out)) == 2
    return losses(out)


@pytest.mark.parametrize(
    ("rendezvous", "sentence"),
    [
        (
            "nowhere.invalid:29500",
            r"expected an agent at nowhere\.invalid:29500 within 1 s, got none \(.*ame",
        ),
        # Of a net for documentation (RFC 5737): there is nobody, or no way to it.
        (
            "192.0.2.1:29500",
            r"expected an agent at 192\.0\.2\.1:29500 within 1 s, got none \(.+\); start the",
        ),
        ("node0", "rendezvous: expected NAME:PORT, got 'node0'"),
    ],
)
def test_torchrun_is_not_started_without_an_agent_at_the_rendezvous(rendezvous, sentence, tmp_path):
    wrong = {"HOSTS": "2", "RENDEZVOUS": rendezvous, "JOIN_TIMEOUT": "1"}
    result = agent(tmp_path / "run", **wrong)
    assert result.returncode == 2
    assert re.fullmatch(rf"error: {sentence}.*\n", result.stderr)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [("JOIN_TIMEOUT", "soon"), ("RANKS", "0"), ("HOSTS", "-1"), ("RESTARTS", "-1")],
)
def test_a_variable_that_is_no_number_is_one_sentence(name, value, tmp_path):
    result = agent(tmp_path / "run", **{name: value})
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: argument {option_of(name)}: ")
    assert result.stderr.count("\n") == 1


def test_a_host_that_does_not_come_to_torchrun_is_one_sentence(tmp_path):
    address = f"localhost:{free_port()}"
    given = {"HOSTS": "2", "RENDEZVOUS": address, "JOIN_TIMEOUT": "2"}
    result = agent(tmp_path / "run", **given)
    assert result.returncode == 2
    assert result.stderr == (
        f"error: expected 2 hosts to join {address} within 2 s, got fewer; start the same command"
        " on each of them, or correct HOSTS\n"
    )


def test_a_port_that_is_taken_is_one_sentence(tmp_path):
    with socket.create_server(("localhost", 0)) as taken:
        address = f"localhost:{taken.getsockname()[1]}"
        result = agent(tmp_path / "run", HOSTS="2", RENDEZVOUS=address, JOIN_TIMEOUT="5")
    assert result.returncode == 2
    sentence = rf"error: expected a rendezvous at {address}, got .*EADDRINUSE.*; correct .*\n"
    assert re.fullmatch(sentence, result.stderr)


@pytest.mark.slow  # the agent's own sentences are in the fast tier, and a rank's are the trainer's
@pytest.mark.ranks
def test_torchrun_ends_with_its_ranks_sentence_and_code(tmp_path):
    result = agent(tmp_path / "run", *TINY, "--model", "none", RANKS="2")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    message = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert message
    assert all(line.startswith("error: unknown model 'none'; ") for line in message)


@pytest.mark.ranks
@pytest.mark.slow  # test_train_command.py has ranks that get the signal of its agent
def test_torchrun_ends_with_a_checkpoint_on_sigterm(tmp_path):
    out = tmp_path / "run"
    process = subprocess.Popen(
        [str(SCRIPTS / "torchrun.sh"), "--out", str(out), *TINY, "--steps", "100000"],
        env=ENVIRONMENT | {"RANKS": "2"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not read_metrics(out):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.terminate()
        _, message = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in message
    assert list((out / "checkpoints").glob("step-*"))


def test_slurms_script_has_directives_of_sbatch():
    found = directives((SCRIPTS / "slurm.sbatch").read_text())
    assert found.keys() <= SBATCH
    assert found["ntasks-per-node"] == "1"


@pytest.mark.ranks
@pytest.mark.slow
def test_slurm(hosts, expected, tmp_path):
    # srun starts a task on each node of the job, with the job's environment and its own number.
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "srun").write_text(
        '#!/bin/bash\n[ "$1" = --kill-on-bad-exit=1 ] || exit 9\nshift\n'
        + "".join(f'{shlex.join(hosts.command(host, []))} "$@" & ' for host in range(2))
        + "wait -n || exit; wait -n\n"
    )
    (tools / "scontrol").write_text(
        # More than a pipe holds, as of many hosts: who reads only the first would end it.
        '#!/bin/bash\n[ "$*" = "show hostnames node[0-1]" ] || exit 9\n'
        f"for host in {{1..20000}}; do echo {hosts.addresses[0]}; done\n"
    )
    for tool in tools.iterdir():
        tool.chmod(0o755)
    slurm = {
        "PATH": f"{tools}:{ENVIRONMENT['PATH']}",
        "SLURM_JOB_ID": free_port(),
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "node[0-1]",
        "RANKS": "1",
    }
    run(["bash", str(SCRIPTS / "slurm.sbatch"), "--out", str(tmp_path / "run"), *TINY], **slurm)
    assert losses(tmp_path / "run") == expected


@pytest.mark.ranks
def test_slurm_is_asked_to_run_a_stopped_job_again(tmp_path):
    for name, body in {"srun": "exit $CODE", "scontrol": 'echo "$@" >> $ASKED; echo a'}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    asked = tmp_path / "asked"
    environment = ENVIRONMENT | {
        "PATH": f"{tmp_path}:{ENVIRONMENT['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "a",
        "SLURM_NNODES": "1",
        "ASKED": str(asked),
    }
    for code, requeues in ((2, 0), (143, 1)):
        result = subprocess.run(
            ["bash", str(SCRIPTS / "slurm.sbatch")], env=environment | {"CODE": str(code)}
        )
        assert result.returncode == code
        assert asked.read_text().count("requeue 7\n") == requeues


def test_skypilots_task_follows_its_schema():
    task = yaml.safe_load((SCRIPTS / "sky.yaml").read_text())
    assert list(violations(task, SKY)) == []


@pytest.mark.slow
@pytest.mark.ranks
def test_skypilot(hosts, expected, tmp_path):
    task = yaml.safe_load((SCRIPTS / "sky.yaml").read_text())
    subprocess.run(["bash", "-n"], input=task["setup"], text=True, check=True)
    sky = task["envs"] | {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_IPS": "\n".join(hosts.addresses),
        "RANKS": "1",
        "OUT": str(tmp_path / "run"),
        "OPTIONS": " ".join(TINY),
        "PORT": free_port(),
    }
    nodes = [sky | {"SKYPILOT_NODE_RANK": str(node)} for node in range(2)]
    run_on_each(hosts, tmp_path, ["bash", "-c", task["run"]], nodes)
    assert losses(tmp_path / "run") == expected


def test_the_kubernetes_job_follows_its_schema():
    job = yaml.safe_load((SCRIPTS / "pytorchjob.yaml").read_text())
    assert list(violations(job, PYTORCHJOB)) == []
    assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"])
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"]["replicas"] == 1
    (pod,) = replicas["Worker"]["template"]["spec"]["containers"]
    mounted = {each["name"] for each in replicas["Worker"]["template"]["spec"]["volumes"]}
    assert {each["name"] for each in pod["volumeMounts"]} == mounted
    own = {each["name"]: each["value"] for each in pod["env"]}
    assert own["FIRST_POD"] == f"{job['metadata']['name']}-master-0"  # as the operator names it


@pytest.mark.slow
@pytest.mark.ranks
def test_kubernetes(hosts, expected, tmp_path):
    job = yaml.safe_load((SCRIPTS / "pytorchjob.yaml").read_text())
    (pod,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    words = [*pod["command"], *pod["args"], "--out", str(tmp_path / "run"), *TINY]
    # The operator's variables; the test has no name service.
    operator = {"WORLD_SIZE": "2", "MASTER_PORT": free_port()}
    operator |= {"RANKS": "1", "FIRST_POD": hosts.addresses[0]}
    pods = [
        operator | {"RANK": str(rank), "MASTER_ADDR": "localhost" if rank == 0 else "unused"}
        for rank in range(2)
    ]
    run_on_each(hosts, tmp_path, words, pods)
    assert losses(tmp_path / "run") == expected


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kind": "PyTorchJobs"}, "the file.kind is 'PyTorchJobs', none of ['PyTorchJob']"),
        ({"spec": {}}, "the file.spec lacks pytorchReplicaSpecs"),
        ({"specs": {}}, "the file has no field specs"),
        ({"metadata": {"name": 1}}, "the file.metadata.name is 1, not str"),
        ({"metadata": []}, "the file.metadata is no mapping"),
    ],
    ids=["enum", "required", "unknown", "type", "mapping"],
)
def test_a_file_that_leaves_its_schema_is_found(change, why):
    job = yaml.safe_load((SCRIPTS / "pytorchjob.yaml").read_text())
    assert list(violations(job | change, PYTORCHJOB)) == [why]
