"""The minimum time of dispatch and combine from data sheets, beside published rates. Nothing is measured.

    python -m benchmarks.gpu.transfer_roofline

A token's row is sent once to each rank that holds any of its experts or, between nodes, once to each node, which passes
it on over NVLink. Experts are chosen uniformly. The slower link limits the transfer. Then the receiver copies the rows
(dispatch) or sums them (combine), at the bandwidth of its memory; a program may hide part of this behind the transfer.
Latencies are not counted.

Rates are logical, as DeepEP's: all rows that are sent, including those that stay on the rank or node, over the whole
time.
"""

from dataclasses import dataclass
from math import comb


@dataclass(frozen=True, slots=True)
class Gpu:
    """Bandwidths from data sheets, in GB/s: NVLink and network in each direction, memory in total."""

    name: str
    memory: float
    nvlink: float
    network: float = 50.0  # ConnectX-7, 400 Gbit/s


H100, H200, H800, B200 = Gpu("H100", 3350, 450), Gpu("H200", 4800, 450), Gpu("H800", 3350, 200), Gpu("B200", 8000, 900)


@dataclass(frozen=True, slots=True)
class Setting:
    """`nodes` x `per_node` ranks, each with T tokens of D bf16 numbers and K of E experts.

    rows_per_node: rows travel between nodes once per node; otherwise, once per rank. node_limit: largest number of
    nodes with a token's experts. published: dispatch and combine, in GB/s, and by whom.
    """

    gpu: Gpu
    nodes: int
    per_node: int
    rows_per_node: bool
    published: str = ""
    node_limit: int | None = None
    T: int = 8192
    D: int = 7168
    E: int = 256
    K: int = 8

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node

    def rows_per_token(self, destinations: int) -> float:
        """Expected number of ranks or nodes that a token is sent to. Experts are divided evenly."""
        share = (self.node_limit or self.nodes) / self.nodes
        experts, chosen = round(self.E * share), round(destinations * share)
        return chosen * (1 - comb(experts - experts // chosen, self.K) / comb(experts, self.K))

    @property
    def sent_rows(self) -> float:
        """Rows per token, including those that stay where they are."""
        return self.rows_per_token(self.nodes if self.rows_per_node else self.ranks)

    def seconds(self) -> tuple[float, float, float]:
        """Minimum time of the links, and of a dispatch and a combine that copy or sum after it."""
        to_ranks = self.rows_per_token(self.ranks)
        over_network = self.sent_rows * (self.nodes - 1) / self.nodes
        over_nvlink = to_ranks * (self.per_node - 1) / self.per_node / (1 if self.rows_per_node else self.nodes)
        links = max(over_network / self.gpu.network, over_nvlink / self.gpu.nvlink)
        copied, summed = 2 * to_ranks / self.gpu.memory, (to_ranks + 1) / self.gpu.memory
        gigabytes = self.T * self.D * 2 / 1e9
        return gigabytes * links, gigabytes * (links + copied), gigabytes * (links + summed)

    def logical_rates(self) -> tuple[float, ...]:
        """Maximum rates in GB/s, for each of these times."""
        sent = self.sent_rows * self.T * self.D * 2 / 1e9
        return tuple(sent / seconds for seconds in self.seconds())


SETTINGS = [
    Setting(H100, 1, 2, False, "419 / 402, Kraken", T=4096, D=4096, E=8, K=1),
    Setting(H200, 1, 8, False),
    Setting(B200, 1, 8, False, "643 / 675 on 24 SMs, 726 / 740 on 64, DeepEP 2"),
    Setting(H100, 2, 8, False),
    Setting(H100, 2, 8, True, "90 / 81, DeepEP 2"),
    Setting(H100, 4, 8, True, "61 / 61, DeepEP 2"),
    Setting(H100, 8, 8, False),
    Setting(H100, 8, 8, True),
    Setting(H800, 8, 8, True, "51 / 50, DeepEP 1", node_limit=4, T=4096),
]


HEADER = "ranks", "links", "rows per token", "min ms: links, dispatch, combine", "max GB/s: the same", "published GB/s"


def table() -> str:
    lines = [f"| {' | '.join(HEADER)} |", "|---" * len(HEADER) + "|"]
    for one in SETTINGS:
        ranks, links = str(one.ranks), f"NVLink of {one.gpu.name}"
        if one.nodes > 1:
            ranks = f"{one.nodes} x {one.per_node}"
            links += f" and 400 Gbit/s, a row per {'node' if one.rows_per_node else 'rank'}"
        if one.node_limit:
            links += f", at most {one.node_limit} nodes"
        times = ", ".join(f"{1e3 * s:.2f}" for s in one.seconds())
        rates = ", ".join(f"{rate:.0f}" for rate in one.logical_rates())
        lines.append(f"| {ranks} | {links} | {one.sent_rows:.2f} | {times} | {rates} | {one.published} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
