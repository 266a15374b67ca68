"""The command line as a whole: help, errors in one line, hints, Ctrl-C."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from threading import Thread

import pytest
from PIL import Image

import scram
from scram.cli import main
from support.command import call
from support.processes import run_program, run_python

pytestmark = pytest.mark.slow

SMALL = Path(__file__).parents[2] / "src/scram/cli/data/city_a.jpg"


def test_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, printed, complaints = call("demo", "--size", 24, "--out", tmp_path / "file" / "folder")
    assert (code, printed) == (2, "")
    assert complaints.startswith("scram: ")
    assert complaints.count("\n") == 1
    assert str(tmp_path / "file") in complaints


def test_the_module_is_the_command() -> None:
    assert run_program(sys.executable, "-m", "scram", "--version").stdout == f"scram {scram.__version__}\n"


def test_version_and_help() -> None:
    assert call("--version") == (0, f"scram {scram.__version__}\n", "")
    code, printed, _ = call("--help")
    assert code == 0
    for word in ("demo", "info", "Examples", "docs/glossary.md"):
        assert word in printed


def test_missing_extra_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "PIL", None)  # type: ignore[arg-type]
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    complaint = capsys.readouterr().err
    assert complaint.count("\n") == 1
    assert "typer, pillow" in complaint
    assert "pip install '.[cli]'" in complaint


def test_hints_name_the_extras_as_the_page_of_commands_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ["skimage", *(name for name in sys.modules if name.startswith("skimage."))]:  # of other tests
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    page = (Path(__file__).parents[2] / "docs" / "commands.md").read_text()
    complaint = call("denoise", "camera", "--out", tmp_path)[2]
    assert complaint.startswith("scram: scikit-image is not installed")
    assert complaint.count("\n") == 1
    assert complaint[complaint.index("pip install") :].strip() in page
    with Image.open(SMALL) as picture:
        picture.crop((0, 0, 48, 48)).save(tmp_path / "a.png")
    monkeypatch.setitem(sys.modules, "cv2", None)  # type: ignore[arg-type]
    printed = call("denoise", tmp_path / "a.png", "--add-noise", 25, "--out", tmp_path)[1]
    hint = next(line for line in printed.splitlines() if line.startswith("skimage, cv2 are not installed"))
    assert hint.endswith("pip install '.[cli,bench]'")


LIGHT = """
import sys
from scram.cli import main
for line in sys.stdin.read().splitlines():
    sys.argv = ["scram", *line.split()]
    try:
        main()
    except SystemExit as stop:
        heavy = [name for name in ("torch", "numpy", "numba", "matplotlib", "PIL") if name in sys.modules]
        print(f"@{line}|{stop.code}|{heavy}", flush=True)
"""


def test_help_and_wrong_arguments_import_nothing_heavy(tmp_path: Path) -> None:
    right = ("--help", "--version", "match --help", "bench --help")
    wrong = (
        "sideways",
        "demo --sise 3",
        "demo --size tall",
        "demo --size 3",
        "match a.png",
        "match none.png none.png",
        "match --sample citty",
        "match --sample city --scale nan",
        "denoise cofee",
        "denoise camera --patch 4",
        "denoise camera --device tpu",
        "figures --only everything",
        "figures --data none",
        "bench --sizes a",
        "bench --widths 5000",
        "bench --parts sideways",
        "bench --out {}/file/x",
        "judge none.npz",
        "judge file",
        "judge",
        "explore",
        "explore none.png",
        "explore none.npz",
        "explore --sample citty",
        "explore file --panes tow",
    )
    (tmp_path / "file").write_text("")
    lines = [line.format(tmp_path) for line in (*right, *wrong)]
    done = run_program(sys.executable, "-c", LIGHT, input="\n".join(lines), cwd=tmp_path)
    found = [line[1:].split("|") for line in done.stdout.splitlines() if line.startswith("@")]
    assert found == [[line, "0" if line in right else "2", "[]"] for line in lines]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_flags_take_no_value_in_the_help() -> None:
    for name in ("", "demo", "match", "denoise", "figures", "bench", "coherence", "judge", "explore", "info"):
        printed = call(*name.split(), "--help")[1]
        assert "--help" in printed
        assert "<bool>" not in printed
    assert re.search("--json +Print", call("info", "--help")[1])


class Odd(Exception):
    """No package raises it."""


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (Odd("two\nlines"), "Odd: two; `scram --traceback COMMAND ...` shows where"),
        (RecursionError("too deep"), "RecursionError: too deep; `scram --traceback COMMAND ...` shows where"),
        (KeyError("a"), "KeyError: 'a'; `scram --traceback COMMAND ...` shows where"),
        (MemoryError(), "out of memory; give smaller pictures, tensors or sizes"),
        (
            MemoryError("Unable to allocate 9 TiB"),
            "out of memory: Unable to allocate 9 TiB; give smaller pictures, tensors or sizes",
        ),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:9] DefaultCPUAllocator: can't allocate memory\nat 0x1"),
            "out of memory: [enforce fail at alloc_cpu.cpp:9] DefaultCPUAllocator: can't allocate memory; "
            "give smaller pictures, tensors or sizes",
        ),
        (ValueError("scale must be positive"), "scale must be positive"),
        (ValueError(), "ValueError"),
        (FileNotFoundError(2, "No such file", "a.png"), "a.png: No such file"),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, Exception) else "",
)
def test_whatever_goes_wrong_is_one_line(error: Exception, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr("scram.cli.info.run", fails)
    assert call("info") == (2, "", f"scram: {line}\n")
    code, printed, complaint = call("--traceback", "info")
    assert (code, printed) == (2, "")
    assert complaint.startswith("Traceback (most recent call last):")
    assert "in fails" in complaint
    assert complaint.endswith(f"scram: {line}\n")


# For each screen a process of its own, a fork: torch is imported once.
INTERRUPTED = """
import os, signal, sys, time, torch
def wait(*_):
    print(os.getpid(), flush=True, file=sys.__stdout__)  # rich redirects sys.stdout
    for _ in range(600):  # a signal just before a long sleep would wait for its end
        time.sleep(.1)
for screen in sys.argv[1:]:
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    os.dup2(int(screen), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent in the background ignores it
    from scram.cli import demo, main
    demo.pair_of = wait
    sys.argv = ["scram", "demo", "--out", "new/folder"]
    main()
    os._exit(0)
"""


def test_interrupt_is_one_line_at_once(tmp_path: Path) -> None:
    """Into a pipe and on a terminal."""
    screens, errors = zip(os.pipe(), os.openpty(), strict=True)
    printed: dict[int, list[bytes]] = {screen: [] for screen in screens}

    def read(screen: int) -> None:
        with suppress(OSError):  # the end of a terminal
            while text := os.read(screen, 1 << 12):
                printed[screen].append(text)

    readers = [Thread(target=read, args=(screen,)) for screen in screens]
    for reader in readers:
        reader.start()
    command = [sys.executable, "-c", INTERRUPTED, *map(str, errors)]
    process = subprocess.Popen(command, stdout=-1, cwd=tmp_path, pass_fds=errors)
    for stderr in errors:
        os.close(stderr)
    with process:
        try:
            assert process.stdout is not None
            for _ in screens:
                child = int(process.stdout.readline())
                begun = time.monotonic()
                os.kill(child, signal.SIGINT)
                assert process.stdout.readline() == b"130\n"
                assert time.monotonic() - begun < 10
        finally:
            process.kill()
            for reader in readers:
                reader.join()
            for screen in screens:
                os.close(screen)
    piped, shown = (b"".join(texts).decode() for texts in printed.values())
    assert piped == "scram: interrupted\n"
    assert "scram: interrupted" in shown
    assert "Traceback" not in shown
    assert not (tmp_path / "new").exists()


def test_importing_scram_leaves_the_command_line_alone() -> None:
    code = "import sys, scram; print([m for m in ('scram.cli', 'typer', 'rich', 'matplotlib') if m in sys.modules])"
    assert run_python(code).strip() == "[]"
