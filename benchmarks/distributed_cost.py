"""What a call costs on many machines: seconds, bytes and memory of a rank in each mode, before it is run.

Compute is linear in the points, as measured; links are as published, times the share of it that programs reach.
docs/distributed.md has the formulae, and says how well they hold.
"""

from __future__ import annotations

from dataclasses import dataclass

from scram.spec.clustering import SAMPLED_KEYS, SAMPLED_QUERIES

ROOM = 0.9  # of a GPU's memory that tensors may take
HALO = 16  # rows of queries on either side, with the default jumps
WIDE = 4  # bytes of a float32, in which gradients of keys travel and outputs are joined


@dataclass(frozen=True)
class Link:
    """One way of bytes from a rank to another: bytes per second each way, seconds before the first arrives."""

    name: str
    bandwidth: float
    latency: float

    def seconds(self, sent: float, messages: int = 1) -> float:
        return messages * self.latency + sent / self.bandwidth


@dataclass(frozen=True)
class Machine:
    """GPUs in nodes. Seconds of each part are for one point of one head and one unit of width, bfloat16."""

    memory: float  # bytes of a GPU
    per_node: int
    inside: Link  # of a GPU, to others of its node
    between: Link  # of a GPU, to other nodes
    launch: float  # seconds of a call on few points
    search: float  # and windows, per query, one match
    clusters: float  # made, per key
    tail: float  # 256 clusters, per query
    back_windows: float  # gradients, per query
    back_tail: float


# Compute: fitted to benchmarks/results/gpu_default.json by benchmarks/distributed_model.py. Links: NVLink 4 has
# 450 GB/s each way, InfiniBand NDR 50 GB/s for each GPU; 80 % of that, and the latencies, are assumed.
H200 = Machine(
    memory=141e9,
    per_node=8,
    inside=Link("NVLink", 0.8 * 450e9, 10e-6),
    between=Link("InfiniBand", 0.8 * 50e9, 20e-6),
    launch=307e-6,
    search=4.71e-11,
    clusters=2.7e-11,
    tail=1.3e-11,
    back_windows=3.6e-11,
    back_tail=5.17e-11,
)


@dataclass(frozen=True)
class Prediction:
    """A call in one mode, as the slowest rank has it."""

    mode: str
    seconds: float
    compute: float  # seconds, if nothing had to travel
    transfer: float  # seconds of the links, if nothing had to be computed
    sent: int  # bytes of a rank
    memory: int  # bytes of a rank, its shards included
    bottleneck: str  # "compute", the name of a link, or "memory": it does not fit

    @property
    def fits(self) -> bool:
        return self.bottleneck != "memory"


@dataclass(frozen=True)
class _Sizes:
    """Bytes of a rank's tensors."""

    queries: float  # the output is as large
    keys: float  # and values
    wide_queries: float
    message: float  # keys, values, clusters and labels, as they travel
    gradients: float  # of keys, values and clusters, as they travel
    halo: float  # queries that a rank sends to its neighbors
    samples: float  # queries, keys and values of which joint clusters are made, as a rank sends them


def predict(
    points: float,
    ranks: int,
    *,
    heads: int = 8,
    key_heads: int | None = None,
    width: int = 64,
    itemsize: int = 2,
    clusters: int = 256,
    first_order: bool = True,
    backward: bool = False,
    machine: Machine = H200,
) -> dict[str, Prediction]:
    """What `scram.distributed.attention` would cost with the default search and tail: one prediction for each mode.

    Args:
        points: of the grid, a square one with as many keys as queries, one batch.
        ranks: GPUs, equal shards.
        heads, key_heads, width, itemsize: of q, of k and v (as many by default), of all three, bytes of a number.
        clusters, first_order: of the tail; 0 for none. A ring makes as many of each shard. The time of routed keys is
            not counted.
        backward: forward and backward pass, in place of the forward pass alone.
        machine: what each rank is and how they are linked.

    Returns:
        predictions by mode; "heads" only where ranks divide the key heads.

    >>> modes = predict(1e8, 8, heads=8, width=64)
    >>> min(modes.values(), key=lambda one: (not one.fits, one.seconds)).mode
    'heads'
    """
    key_heads = heads if key_heads is None else key_heads
    for name, value in (("points", points), ("ranks", ranks), ("heads", heads), ("width", width)):
        if value < 1:
            raise ValueError(f"{name} must be 1 or more, got {value}")
    if key_heads < 1 or heads % key_heads:
        raise ValueError(f"heads must be a multiple of key_heads, got {heads} and {key_heads}")
    rows = points / ranks * heads
    key_rows = points / ranks * key_heads
    means = key_heads * clusters  # of a shard in a ring; of all shards where keys are gathered
    slope = key_heads * width * width if clusters and first_order else 0
    constants = 4 * (key_rows + 2 * means + key_heads * width) if clusters else 0  # labels, sizes, spreads, variance
    sizes = _Sizes(
        queries=rows * width * itemsize,
        keys=2 * key_rows * width * itemsize,
        wide_queries=rows * width * WIDE,
        message=2 * key_rows * width * itemsize + (2 * means * width + slope) * WIDE + constants,
        gradients=(2 * (key_rows + means) * width + slope) * WIDE,
        halo=rows * width * itemsize * min(1, HALO * ranks / points**0.5) * (min(ranks, 3) - 1),
        samples=(1 - 1 / ranks)
        * width
        * itemsize
        * (heads * min(points, SAMPLED_QUERIES) + 2 * key_heads * min(points, SAMPLED_KEYS))
        * (clusters > 0),
    )
    work = _Work(machine, rows * width, key_rows * width, clusters, backward)
    predictions = [_gather(ranks, sizes, work, machine), _ring(ranks, sizes, work, machine)]
    if key_heads % ranks == 0:
        predictions.insert(0, _heads(ranks, sizes, work, machine))
    return {one.mode: one for one in predictions}


@dataclass(frozen=True)
class _Work:
    """Seconds of the parts of a call."""

    machine: Machine
    queries: float  # times width
    keys: float  # times width
    clusters: int
    backward: bool

    def prepare(self) -> float:
        return self.keys * self.machine.clusters if self.clusters else 0.0

    def visit(self) -> float:
        """Search and attention over the keys of all shards, or of one."""
        tail = self.machine.tail * self.clusters / 256
        return self.machine.launch + self.queries * (self.machine.search + tail)

    def back(self) -> float:
        tail = self.machine.back_tail * self.clusters / 256
        return self.machine.launch + self.queries * (self.machine.back_windows + tail)


def _heads(ranks: int, sizes: _Sizes, work: _Work, machine: Machine) -> Prediction:
    """Queries, keys, values, and back the output; in the backward pass the same the other way."""
    passes = 1 + work.backward
    sent = passes * (2 * sizes.queries + sizes.keys) * (ranks - 1) / ranks
    transfer, link = all_to_all(machine, ranks, sent, 4 * passes)
    compute = work.prepare() + work.visit() + work.backward * work.back()
    held = 2 * (sizes.queries + sizes.keys) + 5 * sizes.queries
    if work.backward:
        held = 3 * (sizes.queries + sizes.keys) + 4 * sizes.queries + max(sizes.gradients, 4 * sizes.queries)
    return _prediction("heads", compute + transfer, compute, transfer, link, sent, held, machine)


def _gather(ranks: int, sizes: _Sizes, work: _Work, machine: Machine) -> Prediction:
    """One all-gather; in the backward pass one reduce-scatter."""
    sent = (ranks - 1) * (sizes.message + work.backward * sizes.gradients) + sizes.halo + sizes.samples
    transfer, link = all_gather(machine, ranks, sent, 3 + work.backward)
    compute = work.prepare() + work.visit() + work.backward * work.back()
    held = sizes.queries + sizes.keys + (1 + 2 * ranks) * sizes.message
    if work.backward:
        held = 4 * sizes.queries + sizes.keys + ranks * (2 * sizes.message + 3 * sizes.gradients)
    return _prediction("gather", compute + transfer, compute, transfer, link, sent, held, machine)


def _ring(ranks: int, sizes: _Sizes, work: _Work, machine: Machine) -> Prediction:
    """Steps overlap with visits; the hop between two nodes is as slow as that one link."""
    link = machine.inside if ranks <= machine.per_node else machine.between
    keys = link.seconds(sizes.message)
    gradients = link.seconds(sizes.gradients)
    visit = work.visit()
    again = work.visit() + work.back()
    halo = link.seconds(sizes.halo) if ranks > 1 else 0.0
    seconds = work.prepare() + halo + round_trip(ranks, visit, keys)
    compute = work.prepare() + ranks * visit
    transfer = halo + (ranks - 1) * keys
    sent = sizes.halo + (ranks - 1) * sizes.message
    travels = 1 + (ranks > 1)  # messages held: here, and coming
    held = 2 * sizes.queries + sizes.keys + travels * sizes.message + 3 * sizes.wide_queries
    if work.backward:
        seconds += round_trip(ranks, again, keys, gradients)
        compute += ranks * again
        steps = ranks if ranks > 1 else 0
        transfer += (ranks - 1) * keys + steps * gradients
        sent += (ranks - 1) * sizes.message + steps * sizes.gradients
        held = 4 * sizes.queries + 2 * sizes.keys + 5 * sizes.wide_queries
        held += travels * (sizes.message + 2 * sizes.gradients)
    return _prediction("ring", seconds, compute, transfer, link, sent, held, machine)


def _prediction(
    mode: str, seconds: float, compute: float, transfer: float, link: Link, sent: float, held: float, machine: Machine
) -> Prediction:
    slowest = "memory" if held > ROOM * machine.memory else "compute" if compute >= transfer else link.name
    return Prediction(mode, seconds, compute, transfer, round(sent), round(held), slowest)


def round_trip(ranks: int, visit: float, keys: float, gradients: float = 0.0) -> float:
    """Seconds in which all shards of keys come by.

    At each stop a rank begins to send the keys on, computes for `visit` seconds, and waits for the next keys, which
    take `keys` seconds. In a backward pass it also waits for the gradients of the keys that are here, which take
    `gradients` seconds on the same link, adds its own and sends them on; at last they go home. About
    ranks * max(visit, keys + gradients).
    """
    now = free = keys_there = gradients_there = 0.0
    for stop in range(ranks):
        last = stop + 1 == ranks
        if not last:
            keys_there = free = max(now, free) + keys
        now = max(now + visit, gradients_there)
        if gradients and ranks > 1:
            gradients_there = free = max(now, free) + gradients
        if not last:
            now = max(now, keys_there)
    return max(now, gradients_there)


def all_gather(machine: Machine, ranks: int, sent: float, messages: int = 1) -> tuple[float, Link]:
    """Seconds of an all-gather or reduce-scatter of which each rank sends so much, and the link that sets them.

    All GPUs of a node share what goes to other nodes.
    """
    hops = messages * (ranks - 1)
    inside = machine.inside.seconds(sent, hops)
    if ranks <= machine.per_node:
        return inside, machine.inside
    between = machine.between.seconds(sent / machine.per_node, hops)
    return max((inside, machine.inside), (between, machine.between), key=lambda one: one[0])


def all_to_all(machine: Machine, ranks: int, sent: float, messages: int = 1) -> tuple[float, Link]:
    """Seconds of an all-to-all of which each rank sends so much, in equal parts, and the link that sets them."""
    if ranks <= machine.per_node:
        return machine.inside.seconds(sent, messages if ranks > 1 else 0), machine.inside
    share = (machine.per_node - 1) / (ranks - 1)
    inside = machine.inside.seconds(sent * share, messages)
    between = machine.between.seconds(sent * (1 - share), messages)
    return max((inside, machine.inside), (between, machine.between), key=lambda one: one[0])
