"""Compiled code is kept on disk, and made anew when a source changes; compiling is said, once."""

import os
import subprocess
import sys
import textwrap

import numba
import pytest

from scram._compat import numba_cache

pytestmark = pytest.mark.slow
PROGRAM = """
    import logging, sys, time, torch, scram
    sys.stderr.isatty = lambda: True
    logging.basicConfig(level=LEVEL, stream=sys.stdout, format="%(name)s %(levelname)s %(message)s")
    q = torch.randn(1, 1, 16, 8)
    start = time.process_time()
    for _ in range(2): scram.search(q, q, search=scram.Search(matches=2), impl="numba")
    print(time.process_time() - start)
    """


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What the program says to the log and to a terminal, and its seconds: first, again, without the index files."""
    folder = tmp_path_factory.mktemp("cache")
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder)}

    def output(level):
        command = [sys.executable, "-W", "error", "-c", textwrap.dedent(PROGRAM.replace("LEVEL", level))]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=True)
        *said, seconds = done.stdout.splitlines()
        return said, done.stderr.splitlines(), float(seconds)

    first, again = output("logging.WARNING"), output("logging.WARNING")
    assert list(folder.rglob("*.nbc"))
    for path in folder.rglob("*.nbi"):
        path.unlink()
    return first, again, output("logging.INFO")


def test_compiled_code_is_kept_on_disk(runs):
    (*_, cold), (*_, warm), (*_, anew) = runs
    assert warm < cold / 3
    assert warm < anew / 3


def test_compiling_is_said_once_and_loading_is_not(runs):
    first, again, logged = runs
    assert not first[0]
    assert len(first[1]) == 1
    assert first[1][0].startswith("scram: compiling the CPU kernels (search) for float32, rank 1; this happens once")
    assert again[:2] == ([], [])  # loaded from the disk
    assert len(logged[0]) == 2  # sweeps, and the sort of several matches
    assert logged[0][0].startswith("scram INFO compiling the CPU kernels (search) for float32, rank 1")
    assert not logged[1]


def test_the_cache_on_disk_knows_all_sources(monkeypatch, tmp_path):
    """Numba looks at the file of the function that is cached only, not at those of what it calls."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    def compiled_anew():
        def one(x):
            return x + 1

        function = numba_cache.cached(one)
        function(1)
        return sum(function.stats.cache_misses.values())

    assert [compiled_anew(), compiled_anew()] == [1, 0]
    monkeypatch.setattr(numba_cache, "SOURCES", "edited")
    assert [compiled_anew(), compiled_anew()] == [1, 0]


def test_without_a_folder_for_the_cache_it_compiles_in_memory(monkeypatch):
    from numba.core.caching import CacheImpl

    monkeypatch.setattr(CacheImpl, "_locator_classes", [])
    assert numba_cache.cached(lambda x: x + 1)(1) == 2
