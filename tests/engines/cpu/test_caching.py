"""Compiled code is kept on disk, and made anew when a source changes."""

import numba
import pytest

from processes import run_python
from scram.engines.cpu import caching

pytestmark = pytest.mark.slow


def test_compiled_code_is_kept_on_disk(tmp_path):
    code = """
        import time, torch, scram
        q = torch.randn(1, 1, 16, 8)
        start = time.perf_counter()
        scram.attention(q, q, q, impl="numba")
        print(time.perf_counter() - start)
        """
    cold, warm = (float(run_python(code, NUMBA_CACHE_DIR=str(tmp_path))) for _ in range(2))
    assert list(tmp_path.rglob("*.nbc"))
    assert warm < cold / 3


def test_the_cache_on_disk_knows_all_sources(monkeypatch, tmp_path):
    """Numba looks at the file of the function that is cached only, not at those of what it calls."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    def compiled_anew():
        def one(x):
            return x + 1

        function = caching.cached(one)
        function(1)
        return sum(function.stats.cache_misses.values())

    assert [compiled_anew(), compiled_anew()] == [1, 0]
    monkeypatch.setattr(caching, "SOURCES", "edited")
    assert [compiled_anew(), compiled_anew()] == [1, 0]


def test_without_a_folder_for_the_cache_it_compiles_in_memory(monkeypatch):
    from numba.core.caching import CacheImpl

    monkeypatch.setattr(CacheImpl, "_locator_classes", [])
    assert caching.cached(lambda x: x + 1)(1) == 2
