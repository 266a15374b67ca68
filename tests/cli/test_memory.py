"""What is free: the least of what the machine, the container and the limit of the process leave."""

import resource
from pathlib import Path

import pytest

from scram.cli import memory
from scram.timing import memory_status


def test_what_does_not_fit_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda: 2_500_000_000)
    memory.check(2_500_000_000, "a.png: denoising needs", "give a smaller picture")
    message = r"a\.png: denoising needs about 2\.6 GB of memory, and 2\.5 GB are free; give a smaller picture"
    with pytest.raises(ValueError, match=message):
        memory.check(2_600_000_000, "a.png: denoising needs", "give a smaller picture")
    monkeypatch.setattr(memory, "available", lambda: None)
    memory.check(10**18, "a.png: denoising needs", "give a smaller picture")


def test_the_least_limit_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "CONTAINER", tmp_path)
    of_machine = memory_status("MemAvailable", "/proc/meminfo")
    if of_machine is None:
        pytest.skip("Linux alone says what is free")
    assert memory.available() == pytest.approx(of_machine, rel=0.5)
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._container() is None
    for name, text in {"max": "5000\n", "current": "4000\n", "stat": "file 900\ninactive_file 700\n"}.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert memory.available() == 1700
    used = memory_status("VmSize")
    assert used is not None
    monkeypatch.setattr(resource, "getrlimit", lambda _: (used + 900, used + 900))
    assert memory.available() in range(901)
