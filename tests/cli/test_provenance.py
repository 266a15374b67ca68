"""What a result was made with."""

import datetime
import importlib.metadata
import platform
import subprocess

import torch

import scram
from scram.cli import provenance


def test_a_result_says_what_it_was_made_with():
    found = provenance.made_with("cpu")
    assert datetime.date.fromisoformat(found["date"]) <= datetime.date.today()
    machine = found["machine"]
    assert (machine["threads"], machine["gpu"]) == (torch.get_num_threads(), None)
    assert machine["cpu"]
    assert machine["versions"]["scram"] == scram.__version__
    assert machine["versions"]["torch"] == importlib.metadata.version("torch")
    assert machine["versions"]["python"] == platform.python_version()


def test_missing_packages_are_left_out():
    assert set(provenance.installed(("torch", "no-such-package"))) == {"torch"}


def test_the_commit_is_marked_where_sources_differ(monkeypatch):
    real = subprocess.run

    def answers(changed):
        def run(command, **how):
            said = {"ls-files": "", "rev-parse": "abc123\n", "status": changed}[command[3]]
            return subprocess.CompletedProcess(command, 0, said, "")

        return run

    monkeypatch.setattr(subprocess, "run", answers(""))
    assert provenance.commit() == "abc123"
    monkeypatch.setattr(subprocess, "run", answers(" M api.py"))
    assert provenance.commit() == "abc123+"
    monkeypatch.setattr(subprocess, "run", lambda command, **how: real(["false"], **how))
    assert provenance.commit() == "installed"
