"""The manifests of Kubernetes and SkyPilot fit the schemas of their programs, and start valid commands."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch.distributed.run
import yaml

from moe_dualpipe.training.options import parse_arguments

ROOT = Path(__file__).parents[2]
KUBERNETES = yaml.safe_load((ROOT / "examples" / "launch" / "kubernetes.yaml").read_text())
SKYPILOT = yaml.safe_load((ROOT / "examples" / "launch" / "skypilot.yaml").read_text())
TYPES = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool}


def violations(value, schema, path=""):
    """What is wrong with a value, by the keywords of JSON schema that the two schemas use."""
    known = {"type", "enum", "pattern", "minimum", "required", "properties", "patternProperties", "items", "anyOf"}
    assert schema.keys() <= known | {"additionalProperties"}, f"{path}: unknown keywords in the schema"
    if options := schema.get("anyOf"):
        tried = [violations(value, {**schema, **option, "anyOf": []}, path) for option in options]
        return min(tried, key=len)
    types = schema.get("type", [])
    kinds = [TYPES[name] for name in ([types] if isinstance(types, str) else types) if name != "null"]
    if kinds and not any(isinstance(value, kind) and isinstance(value, bool) <= (kind is bool) for kind in kinds):
        return [f"{path} must be of type {types}: got {value!r}"]
    found = []
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{path} must be one of {schema['enum']}: got {value!r}")
    if "pattern" in schema and isinstance(value, str) and not re.search(schema["pattern"], value):
        found.append(f"{path} must match {schema['pattern']}: got {value!r}")
    if "minimum" in schema and value < schema["minimum"]:
        found.append(f"{path} must be at least {schema['minimum']}: got {value}")
    if isinstance(value, dict):
        found += [f"{path}.{name} is missing" for name in schema.get("required", []) if name not in value]
        others, patterns = schema.get("additionalProperties", True), schema.get("patternProperties", {})
        for name, item in value.items():
            fitting = [inner for pattern, inner in patterns.items() if re.search(pattern, name)]
            inner = schema.get("properties", {}).get(name, fitting[0] if fitting else others)
            if inner is False:
                found.append(f"{path}.{name} is unknown")
            elif inner is not True:
                found += violations(item, inner, f"{path}.{name}")
    if isinstance(value, list):
        found += [
            bad for i, item in enumerate(value) for bad in violations(item, schema.get("items", {}), f"{path}.{i}")
        ]
    return found


def schema_of(name):
    return json.loads(Path(__file__).with_name(f"{name}_schema.json").read_text())["schema"]


@pytest.mark.parametrize("name,manifest", [("jobset", KUBERNETES), ("skypilot", SKYPILOT)])
def test_a_manifest_fits_the_schema(name, manifest):
    assert violations(manifest, schema_of(name)) == []


def pod_of(manifest):
    return manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


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
    pod, machines = pod_of(KUBERNETES), job["template"]["spec"]["completions"]
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
