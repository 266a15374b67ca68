"""What is free, and what commands need: known before a file is unpacked."""

import json
import re
import resource
import struct
import sys
import zlib
from pathlib import Path

import pytest
from PIL import Image

from scram.cli import memory
from scram.quality.timing import memory_status, reset_peak
from support.command import call
from support.memory_jobs import NAMES
from support.processes import run_program


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


def claims(path: Path, side: int) -> Path:
    """A small PNG of one color that says it has that many pixels on a side."""
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(bytes(6_000_000))), (b"IEND", b"")]
    chunks = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in parts
    )
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))
    return path


@pytest.mark.parametrize(
    "arguments",
    [
        "denoise big.png",
        "denoise folder",
        "match big.png small.png",
        "match small.png big.png --size 64",
        "inpaint big.png --rectangle 0,0,9,9",
        "inpaint small.png --mask big.png",
        "generate big.png",
        "generate small.png --size 5000x5000",
        "retarget big.png --size 100x100",
        "retarget small.png --size 5000x5000",
        "explore big.png",
        "explore small.png --size 4096",
    ],
)
def test_a_command_refuses_before_it_unpacks(arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    claims(tmp_path / "big.png", 9999)
    (tmp_path / "folder").mkdir()
    claims(tmp_path / "folder" / "a.png", 9999)
    Image.new("RGB", (64, 64)).save("small.png")
    monkeypatch.setattr(memory, "available", lambda: 1_000_000_000)
    before = reset_peak("cpu")
    code, printed, complaint = call(*arguments.split(), "--out", "new")
    assert (code, printed) == (2, "")
    assert re.match(
        r"scram: (big|small|folder)\S*: \w+ needs about [\d.]+ GB of memory, and 1\.0 GB are free; ", complaint
    )
    assert complaint.count("\n") == 1
    assert (memory_status("VmHWM") or 0) - before < 400_000_000
    assert not (tmp_path / "new").exists()


@pytest.fixture(scope="module")
def ratios() -> dict[str, float]:
    """Of a process of its own whose allocator gives freed memory back, so that peaks are those of the work alone."""
    if memory_status("VmHWM") is None:
        pytest.skip("Linux alone says what was held")
    environment = {
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    done = run_program(sys.executable, "-m", "support.memory_jobs", environment=environment)
    found: dict[str, float] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_estimate_is_above_the_peak_and_not_far(name: str, ratios: dict[str, float]) -> None:
    assert 0.9 < ratios[name] < 4
