"""The ranks of a mesh: what each holds, and how numbers, bytes and errors get from one to another.

All transport is torch's: `all_gather_single`, `reduce_scatter_single`, `all_to_all_single`, `batch_isend_irecv`.
Tensors of any dtype and shape travel as bytes in one message. Nothing is pickled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._compat.distributed import all_gather_single, reduce_scatter_single
from .traffic import count, waiting

ALIGNMENT = 16  # bytes: a tensor in a message begins at a multiple
MOST_WORDS = 1024  # bytes of an error that travel

Layout = Sequence[tuple[tuple[int, ...], torch.dtype]]  # shapes and dtypes of the tensors in a message


class Coming(NamedTuple):
    """A message on its way from the previous rank."""

    message: Tensor
    sent: Tensor  # kept until it has left
    works: list[Any]

    def wait(self) -> Tensor:
        with waiting():
            for work in self.works:
                work.wait()
        return self.message


class Ranks:
    """The ranks of a mesh of one dimension."""

    def __init__(self, mesh: Any) -> None:
        if not isinstance(mesh, DeviceMesh):
            way = 'use torch.distributed.device_mesh.init_device_mesh("cpu", (ranks,))'
            raise TypeError(f"mesh must be a torch DeviceMesh, got {type(mesh).__name__}; {way}")
        if mesh.ndim != 1:
            names = mesh.mesh_dim_names or ()
            raise ValueError(f"mesh must have one dimension, got {mesh.ndim} {names}; use one of them, mesh['name']")
        self.group: Any = mesh.get_group()
        self.device = torch.device(mesh.device_type)
        self.rank = mesh.get_local_rank()
        self.size = mesh.size()

    # --- numbers and errors ---

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """What every rank says, in order of the ranks; all say equally many numbers."""
        if self.size == 1:
            return [list(numbers)]
        local = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        everyone = local.new_empty(self.size * len(numbers))
        all_gather_single(everyone, local, group=self.group)
        gathered: list[list[int]] = everyone.reshape(self.size, -1).tolist()
        return gathered

    def agree(self, error: Exception | None) -> None:
        """Raises on every rank where one has an error: on that rank the error, on the others one that names it."""
        self.raise_failures(error, self.exchange([error is not None]))

    def raise_failures(self, error: Exception | None, everyone: list[list[int]]) -> None:
        """As `agree`, where the first of the numbers that were exchanged says who has an error."""
        failed = [rank for rank, (flag, *_) in enumerate(everyone) if flag]
        if not failed:
            return
        words = b"" if error is None else f"{type(error).__name__}: {error}".encode()[:MOST_WORDS]
        texts = self.exchange(list(words.ljust(MOST_WORDS, b"\0")))
        if error is not None:
            raise error
        reasons = [f"rank {rank}: {bytes(texts[rank]).rstrip(bytes(1)).decode(errors='replace')}" for rank in failed]
        raise RuntimeError(f"scram.distributed.attention failed on {'; '.join(reasons)}")

    @contextmanager
    def together(self) -> Iterator[None]:
        """What one rank raises inside, all ranks raise at the end: nobody waits for a rank that is gone."""
        error = None
        try:
            yield
        except Exception as raised:
            error = raised
        self.agree(error)

    # --- tensors ---

    def all_gather(self, message: Tensor) -> Tensor:
        """message [n] of every rank, equally long -> [ranks, n]."""
        everyone = message.new_empty(self.size * message.shape[0])
        count(*[(self.size - 1) * message.nbytes] * 2)
        with waiting():
            all_gather_single(everyone, message, group=self.group)
        return everyone.reshape(self.size, -1)

    def reduce_scatter(self, messages: Tensor) -> Tensor:
        """messages [ranks, n], one for each rank -> the sum [n] of what all ranks have for this one."""
        local = messages.new_empty(messages.shape[1])
        count(*[(self.size - 1) * local.nbytes] * 2)
        with waiting():
            reduce_scatter_single(local, messages.flatten(), group=self.group)
        return local

    def all_to_all(self, messages: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """One message [n] for each rank -> one from each; `sizes`: how long those are."""
        buffer = messages[0].new_empty(sum(sizes))
        given = [len(message) for message in messages]
        sent, received = (sum(some) - some[self.rank] for some in (given, list(sizes)))
        count(sent * buffer.itemsize, received * buffer.itemsize)
        with waiting():
            dist.all_to_all_single(buffer, torch.cat(list(messages)), list(sizes), given, group=self.group)
        return list(torch.split(buffer, list(sizes)))

    def pass_on(self, message: Tensor) -> Coming:
        """Begin to send `message` to the next rank and to receive one as long from the previous rank."""
        coming = torch.empty_like(message)
        count(message.nbytes, coming.nbytes)
        ahead, behind = (dist.get_global_rank(self.group, (self.rank + step) % self.size) for step in (1, -1))
        moves = [
            dist.P2POp(dist.isend, message, ahead, self.group),
            dist.P2POp(dist.irecv, coming, behind, self.group),
        ]
        return Coming(coming, message, dist.batch_isend_irecv(moves))


def packed_size(layout: Layout) -> int:
    """Bytes of a message of such tensors."""
    return sum(_padded(math.prod(shape) * dtype.itemsize) for shape, dtype in layout)


def pack(tensors: Sequence[Tensor], size: int) -> Tensor:
    """The tensors as one message, uint8 [size]; `size` at least that of `packed_size`."""
    message = torch.zeros(size, dtype=torch.uint8, device=tensors[0].device)
    begin = 0
    for x in tensors:
        raw = x.detach().contiguous().flatten().view(torch.uint8)
        message[begin : begin + len(raw)] = raw
        begin += _padded(len(raw))
    return message


def unpack(message: Tensor, layout: Layout) -> list[Tensor]:
    """The tensors of a message, as views of it."""
    tensors = []
    begin = 0
    for shape, dtype in layout:
        length = math.prod(shape) * dtype.itemsize
        tensors.append(message[begin : begin + length].view(dtype).reshape(shape))
        begin += _padded(length)
    return tensors


def layout_of(tensors: Sequence[Tensor]) -> Layout:
    return [(tuple(x.shape), x.dtype) for x in tensors]


def _padded(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT
