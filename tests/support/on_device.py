"""Calls of the Triton engine on a device, by tests that make and compare their tensors on the CPU."""

import dataclasses
import functools

import pytest
import torch

import scram
from scram.core.tails.base import Tail

FUNCTIONS = ("correlation", "search", "cluster", "route", "attend", "attention", "estimate", "local")


def moved(monkeypatch, device="cuda"):
    """Until the test ends, impl="triton" takes and returns CPU tensors; it runs on copies on the device."""
    for name in FUNCTIONS:
        monkeypatch.setattr(scram, name, _on(device, getattr(scram, name)))


def to(x, device):
    """The same with every tensor in it on the device; settings keep their seeds, which are on the CPU."""
    if isinstance(x, (torch.Tensor, scram.Matches, scram.Codebook)):
        return x.to(device)
    if isinstance(x, tuple):
        many = [to(one, device) for one in x]
        return type(x)(*many) if hasattr(x, "_fields") else tuple(many)
    if dataclasses.is_dataclass(x) and not isinstance(x, (scram.Search, Tail)):
        return dataclasses.replace(x, **{f.name: to(getattr(x, f.name), device) for f in dataclasses.fields(x)})
    return x


def _on(device, function):
    @functools.wraps(function)
    def call(*args, impl="auto", **kwargs):
        if impl != "triton" or args[0].is_cuda:
            return function(*args, impl=impl, **kwargs)
        if args[0].dtype == torch.float64:
            pytest.skip("the Triton engine takes no float64")
        given = {name: to(x, device) for name, x in kwargs.items()}
        return to(function(*to(args, device), impl=impl, **given), "cpu")

    return call
