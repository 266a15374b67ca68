"""The command line as a whole: help, errors in one line, hints, Ctrl-C."""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import Thread

import pytest

import scram
from command import call
from scram.cli import main

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
    done = subprocess.run([sys.executable, "-m", "scram", "info"], capture_output=True, text=True, check=True)
    assert scram.__version__ in done.stdout


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
    (tmp_path / "a.png").write_bytes(SMALL.read_bytes())
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
        "sideways", "demo --sise 3", "demo --size tall", "demo --size 3", "match a.png", "match none.png none.png",
        "match --sample citty", "match --sample city --scale nan", "denoise cofee", "denoise camera --patch 4",
        "denoise camera --device tpu", "figures --only everything", "figures --data none", "bench --sizes a",
        "bench --widths 5000", "bench --parts sideways", "bench --out {}/file/x",
        "judge none.npz", "judge file", "judge",
        "explore", "explore none.png", "explore none.npz", "explore --sample citty", "explore file --panes tow",
    )  # fmt: skip
    (tmp_path / "file").write_text("")
    lines = [line.format(tmp_path) for line in (*right, *wrong)]
    done = subprocess.run(
        [sys.executable, "-c", LIGHT], input="\n".join(lines), capture_output=True, text=True, check=True, cwd=tmp_path
    )
    found = [line[1:].split("|") for line in done.stdout.splitlines() if line.startswith("@")]
    assert found == [[line, "0" if line in right else "2", "[]"] for line in lines]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_flags_take_no_value_in_the_help() -> None:
    for name in ("", "demo", "match", "denoise", "figures", "bench", "coherence", "judge", "explore", "info"):
        printed = call(*name.split(), "--help")[1]
        assert "--help" in printed
        assert "<bool>" not in printed
    assert re.search("--json +Print", call("info", "--help")[1])


INTERRUPTED = """
import signal, sys, time
from scram.cli import demo, main
def wait(*_):
    print("ready", flush=True, file=sys.__stdout__)  # rich redirects sys.stdout
    time.sleep(60)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent in the background ignores it
demo.pair_of = wait
sys.argv = ["scram", "demo", "--out", "new/folder"]
main()
"""


@pytest.mark.parametrize("terminal", [False, True])
def test_interrupt_is_one_line_at_once(terminal: bool, tmp_path: Path) -> None:
    screen, stderr = os.openpty() if terminal else os.pipe()
    printed: list[bytes] = []

    def read() -> None:
        with suppress(OSError):  # the end of a terminal
            while text := os.read(screen, 1 << 12):
                printed.append(text)

    reader = Thread(target=read)
    reader.start()
    process = subprocess.Popen([sys.executable, "-c", INTERRUPTED], stdout=-1, stderr=stderr, cwd=tmp_path)
    os.close(stderr)
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=10) == 130
        finally:
            process.kill()
            reader.join()
            os.close(screen)
    text = b"".join(printed).decode()
    assert "scram: interrupted" in text
    assert "Traceback" not in text
    assert terminal or text == "scram: interrupted\n"
    assert not (tmp_path / "new").exists()


def test_importing_scram_leaves_the_command_line_alone() -> None:
    code = "import sys, scram; print([m for m in ('scram.cli', 'typer', 'rich', 'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
