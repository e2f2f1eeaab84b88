"""Ranks in processes of this machine that believe to be on several ones."""

import socket

import torch.distributed as dist

from moe_dualpipe.expert_parallel import rank_facts
from moe_dualpipe.runtime.launch import Launch


def pretend(rank, machines, monkeypatch):
    """Leave the test's world, and let this process be rank `rank` of a launch on `machines`, a letter for each rank."""
    port = [free_port()]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    local = machines.count(machines[rank])
    launch = {"RANK": rank, "WORLD_SIZE": len(machines), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port[0]}
    for name, value in launch.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("socket.gethostname", lambda: machines[rank])
    monkeypatch.setattr(rank_facts, "find_machine", lambda: machines[rank])
    return Launch(rank, machines[:rank].count(machines[rank]), len(machines), local)


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
