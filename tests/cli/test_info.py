"""`scram info` names versions and engines."""

import json

import torch

import scram
from support.command import call


def test_info_names_versions_and_implementations() -> None:
    code, printed, _ = call("info")
    assert code == 0
    assert scram.__version__ in printed
    assert torch.__version__ in printed
    assert "reference" in printed
    found = json.loads(call("info", "--json")[1])
    reference = next(one for one in found["implementations"] if one["name"] == "reference")
    assert reference["reasons"] == []
