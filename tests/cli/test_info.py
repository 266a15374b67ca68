"""`scram info` names versions and engines."""

import json

import pytest
import torch

import scram
from scram.cli import info
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


def test_info_says_where_compiled_code_is_kept(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "kept"
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(kept))
    states = {one["name"]: one for one in info.caches()}
    assert states["numba"]["folder"] == str(kept)
    assert "compiled at the first call" in states["numba"]["state"]
    assert not kept.exists()  # nothing is made
    kept.mkdir()
    (kept / "code").write_bytes(bytes(3 * 2**20))
    assert info.caches()[0]["state"] == "3 MiB"
    monkeypatch.setattr(info.os, "access", lambda *_: False)
    assert info.caches()[0]["state"].startswith("cannot be written")


def test_info_says_what_is_missing_and_for_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "_is_there", lambda package: package != "av")
    (absent,) = json.loads(call("info", "--json")[1])["missing"]
    assert absent == {"package": "av", "needed for": "films", "install": "pip install 'scram-attention[video]'"}
    assert "films" in call("info")[1]
    monkeypatch.setattr(info, "_is_there", lambda package: True)
    assert "not installed" not in call("info")[1].split("compiled code")[1]
