"""Calls on a part of the rows, with the noise of the whole call."""

from scram.core.pipeline import run
from scram.core.resolve import Request, resolve


def attention(q, k, v, *, shard, **options):
    return run(resolve(q, k, v, Request(**options)), q, k, v, shard).out


def estimate(q, k, v, matches, *, method, shard, **options):
    return attention(q, k, v, shard=shard, search=None, matches=matches, tail=method, **options)
