"""The manifests of Kubernetes and SkyPilot start valid commands."""

import os
import subprocess
from pathlib import Path

import pytest
import torch.distributed.run
import yaml

from moe_dualpipe.training.options import parse_arguments

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
