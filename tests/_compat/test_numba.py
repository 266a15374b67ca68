"""The private parts of Numba are what they were, and the fallbacks give the same results.

Compiled code is kept on disk, and made anew when a source changes; compiling is said, once.
"""

import errno
import inspect
import os
import sys
import textwrap

import numba
import pytest
import torch

import scram
from scram._compat import numba as compat
from support.processes import run_program, run_python

pytestmark = pytest.mark.slow


def test_the_private_parts_of_numba_are_what_they_were():
    assert compat.PRIVATE


FALLBACK = """
    import gc, sys, torch, numba, numba.core.codegen
    gc.disable()  # Numba makes much that stays
    sys.modules["numba.core.codegen"] = None
    import scram
    from scram._compat import numba as compat
    assert not compat.PRIVATE
    """


def results():
    """Searches of integer features and attention in Numba: all that has a fallback is in both."""
    found = []
    for width in (3, 6):
        torch.manual_seed(3)
        q, k = (torch.randint(-4, 5, (1, 2, 90, width)).float() for _ in range(2))
        matches = scram.search(q, k, search=scram.Search(matches=2, sweeps=2, seed=1), impl="numba")
        out, lse = scram.attend(q, k, torch.randn(1, 2, 90, 5), matches, scale=0.1, dropout_p=0.2, impl="numba")
        found += [matches.index, matches.score, out, lse]
    return found


@pytest.mark.timeout(600)
def test_without_the_private_parts_of_numba_the_results_are_the_same(tmp_path):
    code = textwrap.dedent(FALLBACK) + textwrap.dedent(inspect.getsource(results))
    code += f"torch.save(results(), {str(tmp_path / 'results.pt')!r})"
    run_python(code, NUMBA_OPT="0")  # what it computes, not how fast
    for n, (ours, theirs) in enumerate(zip(results(), torch.load(tmp_path / "results.pt"), strict=True)):
        if n % 4 < 2:  # matches and their scores
            assert torch.equal(ours, theirs)
        else:
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


PROGRAM = """
    import logging, sys, time, torch, scram
    from scram.engines.cpu.search import _best_first
    sys.stderr.isatty = lambda: True
    logging.basicConfig(level=LEVEL, stream=sys.stdout, format="%(name)s %(levelname)s %(message)s")
    q, index, score = torch.randn(1, 1, 16, 8), torch.zeros(1, 1, 16, 2, dtype=torch.int32), torch.zeros(1, 1, 16, 2)
    start = time.process_time()
    for _ in range(2):
        scram.attend(q, q, q, scram.Matches(index, score, (16,)), impl="numba")
        _best_first(1, index[0, 0].numpy(), score[0, 0].numpy())
    print(time.process_time() - start)
    """


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What the program says to the log and to a terminal, and its seconds: first, again, without the index files."""
    folder = tmp_path_factory.mktemp("cache")
    environment = {"NUMBA_CACHE_DIR": str(folder), "NUMBA_OPT": "1"}  # what is kept, not how fast

    def output(level):
        words = (sys.executable, "-W", "error", "-c", textwrap.dedent(PROGRAM.replace("LEVEL", level)))
        done = run_program(*words, environment=environment, timeout=240)
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
    assert first[1][0].startswith("scram: compiling the CPU kernels (attend) for float32, rank 1; this happens once")
    assert again[:2] == ([], [])  # loaded from the disk
    assert len(logged[0]) == 2
    assert logged[0][0].startswith("scram INFO compiling the CPU kernels (attend) for float32, rank 1")
    assert logged[0][1].startswith("scram INFO compiling the CPU kernels (search) for float32;")
    assert not logged[1]


def test_the_cache_on_disk_knows_all_sources(monkeypatch, tmp_path):
    """Numba looks at the file of the function that is cached only, not at those of what it calls."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    def compiled_anew():
        def one(x):
            return x + 1

        function = compat.cached(one)
        function(1)
        return sum(function.stats.cache_misses.values())

    assert [compiled_anew(), compiled_anew()] == [1, 0]
    monkeypatch.setattr(compat, "SOURCES", "edited")
    assert [compiled_anew(), compiled_anew()] == [1, 0]


def test_without_a_folder_for_the_cache_it_compiles_in_memory(monkeypatch):
    from numba.core.caching import CacheImpl

    monkeypatch.setattr(CacheImpl, "_locator_classes", [])
    assert compat.cached(lambda x: x + 1)(1) == 2


def fresh():
    """A function that has compiled nothing yet; all of them have the same files on disk."""

    def one_more(x):
        return x + 1

    return compat.cached(one_more)


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """A folder with the compiled code of `fresh`; its files are (index, code)."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compat, "_unusable", set())
    assert fresh()(1) == 2
    return next(tmp_path.rglob("*.nbi")), next(tmp_path.rglob("*.nbc"))


@pytest.mark.parametrize("content", [b"", b"nothing that was pickled", "half"], ids=["empty", "corrupt", "cut"])
@pytest.mark.parametrize("which", [0, 1], ids=["index", "code"])
def test_a_cache_file_that_cannot_be_read_is_named_once_and_made_anew(kept, which, content):
    whole = kept[which].read_bytes()
    kept[which].write_bytes(whole[: len(whole) // 2] if content == "half" else content)
    with pytest.warns(RuntimeWarning, match=f"compiled code in .*{kept[which].name} cannot be read") as caught:
        assert fresh()(1) == 2
    assert len(caught) == 1
    again = fresh()
    assert again(1) == 2
    assert sum(again.stats.cache_hits.values()) == 1  # what was made anew is kept


def test_a_disk_without_space_is_named_once(monkeypatch, tmp_path):
    from numba.core.caching import IndexDataCacheFile

    def full(self, name, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._data_path(name))

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compat, "_unusable", set())
    monkeypatch.setattr(IndexDataCacheFile, "_save_data", full)
    with pytest.warns(RuntimeWarning, match="cannot be kept in .*No space left on device") as caught:
        assert [fresh()(1), fresh()(1), fresh()(1.5)] == [2, 2, 2.5]
    assert len(caught) == 1
