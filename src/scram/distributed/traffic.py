"""How many bytes a process sends and receives, and how long it waits for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter


@dataclass
class Traffic:
    """What the keys, values and gradients of some calls cost this process on its links.

    Bytes are those of the algorithms, whichever one the backend takes: with P ranks and n bytes, all_gather and
    reduce_scatter send (P - 1) n, all_to_all what is meant for others, a ring n at each step. The few numbers by which
    ranks agree on a call are not counted.
    """

    sent: int = 0  # bytes
    received: int = 0  # bytes
    messages: int = 0  # collectives, and steps of rings
    waited: float = 0.0  # seconds in which the host waited for them; NCCL's host does not wait


_open: list[Traffic] = []  # not of one thread: the backward pass runs in another on GPUs


@contextmanager
def traffic() -> Iterator[Traffic]:
    """Count what this process sends and receives inside, in forward and backward passes.

    with scram.distributed.traffic() as counted:
        scram.distributed.attention(q, k, v, mesh=mesh).sum().backward()
    print(counted.sent)
    """
    counter = Traffic()
    _open.append(counter)
    try:
        yield counter
    finally:
        _open[:] = [one for one in _open if one is not counter]


def count(sent: int, received: int) -> None:
    """One message of so many bytes."""
    for one in _open:
        one.sent += sent
        one.received += received
        one.messages += 1


@contextmanager
def waiting() -> Iterator[None]:
    """The host waits for bytes inside."""
    start = perf_counter()
    try:
        yield
    finally:
        took = perf_counter() - start
        for one in _open:
            one.waited += took
