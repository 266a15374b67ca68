"""Chromium, driven by Playwright, and a page whose attention is known."""

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import scram

SHIFT = (3, -5)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@dataclass
class Known:
    """Tensors [1, 2, 20, 26, 16] whose best keys lie SHIFT away, the settings, and the page made of them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    search: scram.Search | None
    clusters: scram.Clusters
    page: scram.Explorer
    path: Path
    scale: float = 1.5


def fine(*tensors, **settings):
    """A page whose features are rounded so little that its figures are those of the library."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scram.explorer.contents.FINEST_SCORE", 0.004)
        patch.setattr("scram.explorer.contents.FINEST_VALUE", 0.001)
        return scram.explore(*tensors, **settings)


@pytest.fixture(scope="session")
def known(tmp_path_factory):
    noise = torch.Generator().manual_seed(3)
    k = 2 * torch.nn.functional.normalize(torch.randn(1, 2, 20, 26, 16, generator=noise), dim=-1)
    q = k.roll(SHIFT, (2, 3)) + 0.05 * torch.randn(k.shape, generator=noise)
    v = torch.randn(1, 2, 20, 26, 5, generator=noise) + k[..., :5]  # so that values go with scores
    search = scram.Search(matches=3, separation=1, sweeps=4, seed=1)
    clusters = scram.Clusters(count=48, keys=48, seed=1)
    pictures = torch.rand(2, 20, 26, 3, generator=noise).unbind()
    shown = {"pictures": pictures, "title": "Known <b>& shifted", "num_queries": 64}
    page = fine(q, k, v, search=search, tail=clusters, scale=1.5, **shown)
    path = tmp_path_factory.mktemp("explorer") / "known.html"
    page.save(path)
    return Known(q, k, v, search, clusters, page, path)


@pytest.fixture(scope="session")
def unsearched(known):
    """The same without a search: clusters and routed keys alone."""
    page = fine(known.q, known.k, known.v, search=None, tail=known.clusters, scale=1.5, num_queries=64)
    path = known.path.with_name("unsearched.html")
    page.save(path)
    return replace(known, search=None, page=page, path=path)


@pytest.fixture(scope="session")
def browser():
    """One Chromium for all tests of a process."""
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright drives the browser")
    if CHROMIUM is None:
        pytest.skip("no Chromium here; `make browser` installs Debian's")
    with playwright.sync_playwright() as driver:
        # Chromium's own sandbox does not start for root.
        arguments = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        found = driver.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield found
        found.close()


@pytest.fixture
def visit(browser):
    """Open a page; at the end there must have been no complaint on its console, and no request but for itself."""
    contexts, wrong = [], []

    def opened(path: Path, hash_: str = "", width: int = 1200, height: int = 900, **how: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": height}, **how)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on(
            "request", lambda request: request.url.startswith(("file:", "data:", "blob:")) or wrong.append(request.url)
        )
        page.goto(path.as_uri() + hash_)
        page.wait_for_selector("html[data-ready]")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert wrong == []
