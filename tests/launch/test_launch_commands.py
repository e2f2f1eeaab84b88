"""The commands of examples/launch: Slurm with a srun that runs a script, Kubernetes and SkyPilot; and Ray, for real."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed.run
import yaml

from moe_dualpipe.training.options import parse_arguments
from tests.support.runs import losses, records

ROOT = Path(__file__).parents[2]
KUBERNETES = yaml.safe_load((ROOT / "examples" / "launch" / "kubernetes.yaml").read_text())
SKYPILOT = yaml.safe_load((ROOT / "examples" / "launch" / "skypilot.yaml").read_text())


def started(folder, script, variables):
    """What a script starts on a machine: the options of torchrun, and those of train.py."""
    (folder / "bin").mkdir()
    torchrun, words = folder / "bin" / "torchrun", folder / "words"
    torchrun.write_text(f"#!/bin/bash\nprintf '%s\\n' \"$@\" > {words}\n")
    torchrun.chmod(0o755)
    environment = variables | {"PATH": f"{folder}/bin:{os.environ['PATH']}", "HOME": str(folder)}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    options = torch.distributed.run.parse_args(words.read_text().splitlines())
    program, *arguments = options.training_script_args
    assert options.no_python and (options.training_script, program) == ("moe-dualpipe", "train")
    return options, parse_arguments(arguments)


def check_start(options, config, out, resumes):
    assert (options.nnodes, options.nproc_per_node, options.node_rank) == ("2", "8", 1)
    assert (config.checkpoint.out, config.checkpoint.resume) == ((None, out) if resumes else (out, None))
    assert config.preset == "olmoe-1b-7b" and config.parallel.ep == 8 and config.checkpoint.save_every


@pytest.mark.parametrize("resumes", [False, True])
def test_the_command_in_a_pod(tmp_path, resumes):
    (job,) = KUBERNETES["spec"]["replicatedJobs"]
    pod, machines = job["template"]["spec"]["template"]["spec"], job["template"]["spec"]["completions"]
    (container,) = pod["containers"]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    assert job["template"]["spec"]["parallelism"] == int(variables["MACHINES"]) == machines
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(variables["GPUS"])
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    assert Path(mounts["runs"]) in Path(variables["OUT"]).parents
    assert int(variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]
    assert container["command"] == ["bash", "-c"]
    name = KUBERNETES["metadata"]["name"]
    if resumes:
        (tmp_path / "my-run/checkpoints/step-000500").mkdir(parents=True)
    variables |= {"OUT": f"{tmp_path}/my-run", "JOB_COMPLETION_INDEX": "1"}
    options, config = started(tmp_path, container["args"][0], variables)
    check_start(options, config, f"{tmp_path}/my-run", resumes)
    # The host name of the first pod: JobSet, replicated job, number of the job, number of the pod. Then the service.
    assert options.master_addr == f"{name}-{job['name']}-0-0.{name}"


@pytest.mark.parametrize("resumes", [False, True])
def test_the_command_of_a_sky_task(tmp_path, resumes):
    (mount,) = SKYPILOT["volumes"]
    assert Path(mount) in Path(SKYPILOT["envs"]["OUT"]).parents
    assert (ROOT / "constraints.txt").exists()
    if resumes:
        (tmp_path / "my-run/checkpoints/step-000500").mkdir(parents=True)
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/activate").touch()
    machines = {"SKYPILOT_NUM_NODES": str(SKYPILOT["num_nodes"]), "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8"}
    gpus = SKYPILOT["resources"]["accelerators"].partition(":")[2]
    own = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_GPUS_PER_NODE": gpus, "OUT": f"{tmp_path}/my-run"}
    options, config = started(tmp_path, SKYPILOT["run"], SKYPILOT["envs"] | machines | own)
    check_start(options, config, f"{tmp_path}/my-run", resumes)
    assert options.master_addr == "10.0.0.7"


SCRIPT = ROOT / "examples" / "launch" / "slurm.sbatch"
SRUN = f"""#!{sys.executable} -S
import json, os, subprocess, sys
words = sys.argv[1:]
first = next(i for i, word in enumerate(words) if not word.startswith("--"))
names = "NCCL_NET", "FI_PROVIDER", "GLOO_SOCKET_IFNAME", "SRUN_CPUS_PER_TASK", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
found = {{name: os.environ[name] for name in names if name in os.environ}}
call = {{"options": words[:first], "command": words[first:], "set": found}}
with open("srun.jsonl", "a") as file:
    file.write(json.dumps(call) + "\\n")
sys.exit(subprocess.call(["bash", "-c", os.environ["DOES"], "srun", *words[first:]]))
"""
SCONTROL = """#!/bin/bash
case "$1 $2" in
    "show hostnames") printf '127.0.0.1\\n127.0.0.2\\n' ;;
    "show job") echo "   JobState=${STATE:-RUNNING} Reason=None" ;;
    *) echo "$@" >> scontrol.txt ;;
esac
"""
JOB = {
    "SLURM_JOB_ID": "7345",
    "SLURM_JOB_NAME": "moe",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "gpu-[1-2]",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_CPUS_PER_TASK": "64",
}


class Job:
    """A folder in which the script runs, with other values for some of the variables at its top."""

    def __init__(self, folder, **variables):
        text = SCRIPT.read_text()
        for name, value in {"VENV": "", **variables}.items():
            text, count = re.subn(rf"^{name}=[^#\n]*", f"{name}={value} ", text, flags=re.MULTILINE)
            assert count == 1, name
        (folder / "job").write_text(text)
        (folder / "bin").mkdir()
        for name, program in (("srun", SRUN), ("scontrol", SCONTROL)):
            (folder / "bin" / name).write_text(program)
            (folder / "bin" / name).chmod(0o755)
        self.folder = folder

    def run(self, *arguments, **environment):
        """Returns the exit code and the output."""
        outer = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "NCCL_", "GLOO_", "FI_"))}
        path = f"{self.folder}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
        own = {"PATH": path, "SLURM_SUBMIT_DIR": str(self.folder)}
        done = subprocess.run(
            ["bash", self.folder / "job", *map(str, arguments)], env=outer | JOB | own | environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, stdin=subprocess.DEVNULL, timeout=120,
        )  # fmt: skip
        return done.returncode, done.stdout

    def lines(self, name):
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    @property
    def calls(self):
        return [*map(json.loads, self.lines("srun.jsonl"))]


def parsed(call):
    """The options of torchrun, and the arguments of moe-dualpipe, in a command of srun."""
    shell, option, script, name, *words = call["command"]
    assert [shell, option, script, name] == ["bash", "-c", 'exec torchrun --node-rank "$SLURM_NODEID" "$@"', "torchrun"]
    options = torch.distributed.run.parse_args(words)
    assert options.no_python and options.training_script == "moe-dualpipe"
    return options, options.training_script_args


def test_the_check_and_the_run_start_on_all_machines(tmp_path):
    job = Job(tmp_path)
    code, output = job.run("--preset", "tiny", "--steps", 40, "--save-every", 20, DOES="true")
    assert (code, output, job.lines("scontrol.txt")) == (0, "", [])
    check, run = job.calls
    for call, restarts in ((check, 0), (run, 1)):
        assert call["options"] == ["--ntasks=2", "--ntasks-per-node=1", "--kill-on-bad-exit=0", "--wait=300"]
        options, _ = parsed(call)
        assert (options.nnodes, options.nproc_per_node, options.max_restarts) == ("2", "8", restarts)
        assert (options.master_addr, options.master_port) == ("127.0.0.1", 29500 + 345)
        assert call["set"] == {"NCCL_NET": "IB", "SRUN_CPUS_PER_TASK": "64", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "240"}
    assert parsed(check)[1] == ["check", "cluster", "--out", "runs/moe", "--timeout", "60"]
    program, *arguments = parsed(run)[1]
    config = parse_arguments(arguments)
    assert program == "train" and config.preset == "tiny"
    assert (config.steps, config.checkpoint.save_every) == (40, 20)  # the command line counts more than OPTIONS
    assert (config.checkpoint.out, config.checkpoint.resume) == ("runs/moe", None)


@pytest.mark.parametrize("step", [None, "step-000020"])
def test_a_job_resumes_if_its_folder_has_a_checkpoint(tmp_path, step):
    job = Job(tmp_path, CHECK="()", OUT="'here and there'")
    (tmp_path / "here and there" / "checkpoints" / (step or "")).mkdir(parents=True)
    assert job.run(DOES="true") == (0, "")
    assert parsed(job.calls[0])[1][-2:] == ["--resume" if step else "--out", "here and there"]


@pytest.mark.parametrize(
    "does,state,requeued",
    [
        ("mkdir runs/moe/checkpoints/step-1000000; exit 1", "RUNNING", True),
        ("mkdir runs/moe/checkpoints/step-1000000; exit 1", "COMPLETING", False),  # cancelled
        ("mkdir runs/moe/checkpoints/step-1000000; exit 0", "RUNNING", False),  # complete
        ("exit 2", "RUNNING", False),  # nothing was saved
    ],
)
def test_a_job_is_queued_again_if_its_run_has_saved_and_is_not_complete(tmp_path, does, state, requeued):
    job = Job(tmp_path, CHECK="()")
    (tmp_path / "runs/moe/checkpoints/step-999999").mkdir(parents=True)
    code, output = job.run(DOES=does, STATE=state)
    assert code == int(does[-1])
    assert job.lines("scontrol.txt") == (["requeue 7345"] if requeued else [])
    assert ("queued again, and will resume from runs/moe/checkpoints/step-1000000" in output) == requeued


@pytest.mark.parametrize("page", [SCRIPT, ROOT / "docs" / "cluster.md"], ids=["script", "page"])
def test_the_commands_that_are_shown(page):
    commands = re.findall(r"sbatch examples/launch/slurm.sbatch ([^`\n]+)", page.read_text())
    assert commands
    for command in commands:
        parse_arguments(command.split())


KILLS_ITSELF = """
def kill_once(trainer, record):
    if record["step"] == 6 and trainer.layout.rank == 1 and trainer.run.start.resume is None:
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)

"""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_ray_starts_new_workers_and_the_run_resumes(tmp_path):
    pytest.importorskip("ray.train", reason="needs Ray: pip install 'moe-dualpipe[ray]'")
    text = (ROOT / "examples" / "ray_train.py").read_text()
    for old, new in (
        ("STEPS, SAVE_EVERY, RESTARTS = 40, 10, 3", f"STEPS, SAVE_EVERY, RESTARTS = 8, 2, 1\n{KILLS_ITSELF}"),
        ("    train(config)", "    train(config, callbacks=[kill_once])"),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    (tmp_path / "program.py").write_text(text)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"resumed from \S+/runs/ray/checkpoints/step-00000[46], ", done.stdout + done.stderr)
    assert list(losses(records(tmp_path / "runs" / "ray"))) == list(range(1, 9))
