"""The page in Chromium: what it shows is what Python computes, and every control does what it says."""

import io
from dataclasses import replace

import pytest
import torch
from PIL import Image

import scram
from scram.explorer.pack import unpacked
from scram.explorer.page import read_back

pytestmark = pytest.mark.slow
QUERY = (11, 9)
INDEX = QUERY[0] * 26 + QUERY[1]


def number(page, name):
    """A figure of the list beside the picture, a share."""
    words = page.locator(f"dt:text-is('{name}') + dd").inner_text()
    return float(words.removesuffix(" %")) / 100


def matches(page):
    return [line.locator("td").all_inner_texts() for line in page.locator("#matches tbody tr").all()]


def point(page, name, row, column, rows=20, columns=26):
    """The middle of a point of the grid on the screen."""
    box = page.locator(f"#{name}").bounding_box()
    unit = min(box["width"] / columns, box["height"] / rows)
    left, top = box["x"] + (box["width"] - columns * unit) / 2, box["y"] + (box["height"] - rows * unit) / 2
    return left + (column + 0.5) * unit, top + (row + 0.5) * unit


def settle(page):
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def attended(page, head=0, sweep=4, count=3, factor=1):
    call = f"explorer.model.attend({head}, {INDEX}, {{ sweep: {sweep}, count: {count}, factor: {factor} }})"
    return page.evaluate(
        f"(() => {{ const x = {call}; return {{ ...x, exact: [...x.exact], scram: [...x.scram] }}; }})()"
    )


def clustered(known):
    return scram.cluster(known.q, known.k, known.v, clusters=known.clusters, scale=1.5)


def searched(known, **changes):
    search = replace(known.search, **changes)
    return scram.search(known.q, known.k, search=search, codebook=clustered(known), scale=1.5)


def test_moving_over_a_query_shows_its_match(visit, known):
    page = visit(known.path)
    page.mouse.move(*point(page, "queries", *QUERY))
    settle(page)
    found = searched(known)
    where = divmod(int(found.index[(0, 0, *QUERY, 0)]), 26)
    assert where == ((QUERY[0] - 3) % 20, (QUERY[1] + 5) % 26)
    assert matches(page)[0][2] == f"{where[0]}, {where[1]}"
    assert float(matches(page)[0][3]) == pytest.approx(float(found.score[(0, 0, *QUERY, 0)]), rel=0.02)
    assert page.locator("dt:text-is('Place (row, column)') + dd").inner_text() == "11, 9"
    assert page.locator("h1").inner_text() == "Known <b>& shifted"


@pytest.mark.parametrize(("head", "factor"), [(0, 1), (1, 2)])
def test_the_exact_map_is_that_of_exact_attention(visit, known, head, factor):
    page = visit(known.path)
    lse = scram.exact_attention(known.q, known.k, known.v, scale=1.5 * factor).lse[(0, head, *QUERY)].double()
    logits = 1.5 * factor * (known.k[0, head].double() @ known.q[(0, head, *QUERY)].double()).flatten()
    weights = (logits - lse).exp()
    shown = torch.tensor(attended(page, head, factor=factor)["exact"], dtype=torch.float64)
    assert float(shown.sum()) == pytest.approx(1, abs=1e-4)
    off = 0.5 * float((shown - weights).abs().sum())
    assert known.page.numbers["map_error"] < 0.02
    assert off <= 1.5 * factor * known.page.numbers["heads"][head]["map_error_most"]


def test_the_browser_reads_what_python_packed(visit, known):
    about, data = read_back(known.page.html)
    arrays = unpacked(about["arrays"], data)
    page = visit(known.path)
    for name in ("matches", "q1", "k0", "label", "means1", "routes", "spread", "spreads", "slope0"):
        shown = page.evaluate(f"[...explorer.arrays.{name}]")
        assert shown == pytest.approx(arrays[name].ravel().tolist(), abs=1e-6), name


def test_numbers_are_those_of_attend(visit, known):
    page = visit(known.path)
    page.mouse.move(*point(page, "queries", *QUERY))
    settle(page)
    q, k, v = known.q, known.k, known.v
    found = searched(known)
    book = clustered(known)
    windows = scram.attend(q, k, v, found, scale=1.5)
    joined = scram.attend(q, k, v, found, scale=1.5, tail=book)
    exact = scram.exact_attention(q, k, v, scale=1.5)
    at = (0, 0, *QUERY)
    held = float((windows.lse[at] - joined.lse[at]).exp())
    assert number(page, "Captured mass") == pytest.approx(float((windows.lse[at] - exact.lse[at]).exp()), abs=0.01)
    assert number(page, "Weight of the windows") == pytest.approx(held, abs=0.01)
    routed = number(page, "Weight of routed keys")
    assert routed > 0.01
    assert number(page, "Weight of the clusters") == pytest.approx(1 - held - routed, abs=0.01)
    error = float((joined.out[at] - exact.out[at]).norm()) / known.page.numbers["rms"][0]
    assert number(page, "Error of this query") == pytest.approx(error, abs=0.02)
    assert sum(attended(page)["scram"]) == pytest.approx(1, abs=1e-3)
    assert "captured" not in page.locator("#quality").inner_text()
    assert f"{100 * known.page.numbers['quality']['mass']:.1f} %" in page.locator("#quality").inner_text()


@pytest.mark.parametrize("search", [True, False])
@pytest.mark.parametrize("place", [QUERY, (7, 15), (19, 25)])
def test_attention_in_the_browser_is_that_of_the_library(visit, known, unsearched, search, place):
    """Weights of routed keys and of centers, and the output: every term of the clusters, in both heads."""
    page = visit((known if search else unsearched).path)
    q, k, v = known.q, known.k, known.v
    book = clustered(known)
    routes = scram.route(q, k, book)
    joined = scram.attend(q, k, v, searched(known) if search else None, scale=1.5, tail=book, routes=routes)
    exact = scram.exact_attention(q, k, v, scale=1.5)
    for head in range(2):
        at = (0, head, *place)
        shown = page.evaluate(
            f"(() => {{ const x = explorer.model.attend({head}, {place[0] * 26 + place[1]}, {{ sweep: {4 * search}, "
            "count: 3 }); return { ...x, scram: [...x.scram], kinds: [...x.kinds] }; })()"
        )
        label = book.label[0, head].flatten().long()
        routed = routes.chosen[0, head, place[0] // 8 * 4 + place[1] // 8][label]
        kinds = torch.tensor(shown["kinds"])
        assert ((kinds == 2) == routed & (kinds != 1)).all()
        assert shown["routedKeys"] == int(routed.sum())
        assert shown["routedClusters"] == len(label[routed].unique())
        assert (kinds == 1).any() == search
        # A center's share, from the library's normalizer.
        query = q[at]
        spread = 1.5**2 * float((query.square() * book.variance[0, head]).sum())
        raised = (spread * book.spreads[0, head]).clamp(max=2) / 2
        each = (1.5 * book.centers[0, head] @ query + raised - joined.lse[at]).exp()
        own = (1.5 * k[0, head].flatten(0, 1) @ query - joined.lse[at]).exp()
        wanted = torch.where(kinds > 0, own, each[label])
        assert float(wanted.sum()) == pytest.approx(1, abs=1e-4)
        assert 0.5 * float((torch.tensor(shown["scram"]) - wanted).abs().sum()) < 0.003
        error = float((joined.out[at] - exact.out[at]).norm()) / known.page.numbers["rms"][head]
        assert shown["error"] == pytest.approx(error, abs=0.006)


def test_routed_keys_have_a_color_counts_and_a_legend(visit, known):
    page = visit(known.path, f"#query={INDEX}&held=true&clusters=false")

    def colored():
        at = "explorer.panes.keys.weights.image.data"
        shown = torch.tensor(page.evaluate(f"[...{at}]")).reshape(-1, 4)
        return (shown[:, :3] == torch.tensor([216, 27, 114])).all(-1)

    chosen = scram.route(known.q, known.k, clustered(known)).chosen[0, 0, QUERY[0] // 8 * 4 + QUERY[1] // 8]
    kinds = torch.tensor(page.evaluate("[...explorer.found.kinds]"))
    assert ((kinds == 2) == colored()).all()
    keys = int(chosen[clustered(known).label[0, 0].flatten().long()].sum())
    legend = page.locator("#kinds [data-kind=routed]")
    assert legend.inner_text() == f"Routed: {keys} keys of {int(chosen.sum())} clusters"
    assert page.locator("dt:text-is('Routed keys, clusters') + dd").inner_text() == f"{keys}, {int(chosen.sum())}"
    page.get_by_role("checkbox", name="mark routed keys").uncheck()
    settle(page)
    assert not colored().any()
    assert legend.is_hidden()
    tile = page.evaluate("explorer.model.tileFrame(explorer.state.query)")
    assert tile == {"top": 8, "left": 8, "bottom": 16, "right": 16}


def test_a_page_without_a_search(visit, unsearched):
    page = visit(unsearched.path, f"#query={INDEX}&sweep=3&count=2&ground=places")
    assert page.locator("#matches").is_hidden()
    for name in ("count", "sweep"):
        assert page.locator(f"[data-for={name}]").is_hidden()
    assert page.locator("dt:text-is('Captured mass')").count() == 0
    assert "window" not in page.locator("#quality").inner_text()
    assert number(page, "Weight of routed keys") + number(page, "Weight of the clusters") == pytest.approx(1, abs=0.002)
    page.wait_for_timeout(400)
    assert "routed keys hold" in page.locator("#live").inner_text()


def test_controls_change_what_is_shown(visit, known):
    page = visit(known.path, f"#query={INDEX}&held=true")
    first = [line[2] for line in matches(page)]
    assert len(first) == 3
    page.locator("input[name=count]").press("Home")
    settle(page)
    assert [line[2] for line in matches(page)] == first[:1]
    assert "1 of 3" in page.locator("[data-for=count] output").inner_text()
    page.locator("input[name=sweep]").press("Home")
    settle(page)
    start = searched(known, sweeps=0)
    row, column = divmod(int(start.index[(0, 0, *QUERY, 0)]), 26)
    assert matches(page)[0][2] == f"{row}, {column}"
    before = number(page, "Captured mass")
    page.locator("input[name=scale]").press("End")
    settle(page)
    assert number(page, "Captured mass") != before
    page.locator("select[name=head]").select_option("1")
    settle(page)
    row, column = divmod(int(start.index[(0, 1, *QUERY, 0)]), 26)
    assert matches(page)[0][2] == f"{row}, {column}"


def test_views_grounds_and_colors_change_the_pictures(visit, known):
    page = visit(known.path, f"#query={INDEX}&held=true&scale=-2")
    seen = [page.evaluate("Object.values(explorer.panes).map((one) => one.canvas.toDataURL()).join()")]
    for name, value in (
        ("view", "exact"),
        ("map", "cividis"),
        ("ground", "places"),
        ("ground", "rebuilt"),
        ("ground", "features"),
    ):
        if name == "view":
            page.get_by_role("radio", name="Exact").check()
        else:
            page.locator(f"select[name={name}]").select_option(value)
        settle(page)
        seen.append(page.evaluate("Object.values(explorer.panes).map((one) => one.canvas.toDataURL()).join()"))
    assert len(set(seen)) == len(seen)


def test_an_address_opens_the_same_view(visit, known):
    page = visit(known.path)
    page.mouse.move(*point(page, "queries", 4, 20))
    page.locator("#queries").press("ArrowLeft")
    page.locator("input[name=sweep]").press("ArrowLeft")
    page.get_by_role("radio", name="Exact").check()
    page.locator("#keys").press("+")
    page.wait_for_timeout(450)
    state, address = page.evaluate("explorer.state"), page.evaluate("location.hash")
    assert (state["query"], state["sweep"], state["view"]) == (4 * 26 + 19, 3, "exact")
    again = visit(known.path, address)
    assert again.evaluate("explorer.state") == state
    assert again.evaluate("explorer.panes.keys.view.zoom") == 2
    hostile = visit(known.path, "#query=99999&head=-1&view=<script>&scale=NaN&zoom-keys=1,2&zoom-constructor=1,2,3")
    assert hostile.evaluate("explorer.state.head") == 0
    assert hostile.evaluate("explorer.state.query") < 20 * 26
    assert matches(hostile)


def test_the_keyboard_reaches_everything(visit, known):
    page = visit(known.path)
    reached = []
    for _ in range(25):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate(
                "document.activeElement.id || document.activeElement.name || document.activeElement.ariaLabel"
            )
        )
    wanted = {
        "queries",
        "keys",
        "view",
        "clusters",
        "routed",
        "head",
        "count",
        "sweep",
        "scale",
        "ground",
        "map",
        "theme",
        "link",
        "png",
    }
    assert wanted <= set(reached)
    page.locator("#queries").focus()
    start = page.evaluate("explorer.state.query")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Shift+ArrowUp")
    page.keyboard.press("e")
    settle(page)
    assert page.evaluate("explorer.state.query") == start + 1 - 10 * 26
    assert page.evaluate("explorer.state.view") == "exact"
    page.wait_for_timeout(400)
    assert page.locator("#live").inner_text().startswith("Query 0, 14: best match")
    assert "Query 0, 14" in page.locator("#keys").get_attribute("aria-label")


def test_every_control_has_a_name(visit, known):
    page = visit(known.path)
    for kind in ("button", "slider", "combobox", "radio", "checkbox", "application", "img"):
        found = page.get_by_role(kind).all()
        assert found, kind
    bare = page.evaluate("""[...document.querySelectorAll("button, input, select, canvas[id]")].filter((one) =>
        !(one.ariaLabel || one.textContent.trim() && one.tagName === "BUTTON" || one.labels?.length)).length""")
    assert bare == 0


def test_touch_picks_a_query_and_a_click_holds_it(visit, known):
    page = visit(known.path, width=390, height=844, has_touch=True)
    page.locator("#queries").scroll_into_view_if_needed()
    page.touchscreen.tap(*point(page, "queries", 6, 7))
    settle(page)
    assert page.evaluate("explorer.state.query") == 6 * 26 + 7
    mouse = visit(known.path)
    mouse.mouse.click(*point(mouse, "queries", 5, 5))
    mouse.mouse.move(*point(mouse, "queries", 9, 9))
    settle(mouse)
    assert mouse.evaluate("explorer.state") | {"query": 5 * 26 + 5, "held": True} == mouse.evaluate("explorer.state")


def test_zoom_and_pan(visit, known):
    page = visit(known.path, f"#query={INDEX}&held=true")
    page.mouse.move(*point(page, "queries", 0, 0))
    page.mouse.wheel(0, -480)
    settle(page)
    view = page.evaluate("explorer.panes.queries.view")
    assert view["zoom"] == pytest.approx(4)
    assert view["x"] < 13  # the corner under the mouse stays in sight
    page.mouse.down()
    page.mouse.move(*point(page, "queries", 0, -9))
    page.mouse.up()
    settle(page)
    assert page.evaluate("explorer.panes.queries.view.x") > view["x"]
    page.get_by_role("group", name="Zoom of the queries").get_by_label("Show all").click()
    assert page.evaluate("explorer.panes.queries.view.zoom") == 1


@pytest.mark.parametrize(("width", "height"), [(390, 844), (1600, 1000)])
def test_phones_and_wide_screens(visit, known, width, height):
    page = visit(known.path, width=width, height=height)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    outside = page.evaluate("""[...document.querySelectorAll("canvas, button, input, select, dd, td, h1, p")]
        .map((one) => one.getBoundingClientRect())
        .filter((box) => box.width > 1 && (box.left < 0 || box.right > innerWidth)).length""")
    assert outside == 0
    queries, keys = (page.locator(name).bounding_box() for name in ("#queries", "#keys"))
    assert queries["width"] > 300
    assert (keys["y"] > queries["y"]) == (width == 390)  # below each other on a phone, else side by side
    colors = Image.open(io.BytesIO(page.locator("#keys").screenshot())).convert("RGB").getcolors(1 << 20)
    assert len(colors) > 100


def test_dark_and_light(visit, known):
    def brightness(page):
        color = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in color[4:-1].split(",")) / 3

    page = visit(known.path, color_scheme="dark")
    assert brightness(page) < 60
    page.locator("select[name=theme]").select_option("light")
    settle(page)
    assert brightness(page) > 200
    assert brightness(visit(known.path, color_scheme="light")) > 200


def test_a_png_is_saved(visit, known, tmp_path):
    page = visit(known.path, f"#query={INDEX}&held=true")
    with page.expect_download() as waiting:
        page.locator("#png").click()
    waiting.value.save_as(tmp_path / "saved.png")
    assert waiting.value.suggested_filename == f"attention-{INDEX}.png"
    picture = Image.open(tmp_path / "saved.png")
    assert picture.width > 700
    assert len(picture.convert("RGB").getcolors(1 << 22)) > 200


def test_one_pane_with_thinned_queries(visit, tmp_path):
    """Queries stand at every second or third key; the page says so, and marks the right place."""
    k = torch.randn(1, 1, 32, 32, 32, generator=torch.Generator().manual_seed(0))
    whole = scram.explore(3 * k, k, k, search=scram.Search(seed=0))
    made = scram.explore(3 * k, k, k, search=scram.Search(seed=0), budget=whole.size * 7 // 10)
    assert made.numbers["panes"] == 1
    assert made.numbers["queries"]["stride"] > 1
    made.save(tmp_path / "one.html")
    page = visit(tmp_path / "one.html")
    about = made.numbers
    stride, side = about["queries"]["stride"], about["keys"]["grid"][0]
    assert page.locator("#queries").is_hidden()
    page.mouse.move(*point(page, "keys", 4, 6, side, side))
    settle(page)
    query = (4 // stride) * about["queries"]["grid"][1] + 6 // stride
    assert page.evaluate("explorer.state.query") == query
    last = page.evaluate("explorer.model.tile(explorer.model.points - 1)")
    assert last == [(side - 1) // stride * stride // 8] * 2
    place = ", ".join(str(x // stride * stride) for x in (4, 6))
    assert page.locator("dt:text-is('Place (row, column)') + dd").inner_text() == place
    assert "query of each axis can be chosen" in page.locator("#note-list").text_content()
    assert page.evaluate("explorer.model.placeOf(explorer.state.query)") == [x // stride * stride for x in (4, 6)]


def test_a_notebook_frame_shows_the_page(visit, known, tmp_path):
    outer = tmp_path / "notebook.html"
    outer.write_text(
        f"<!doctype html><html data-ready><link rel=icon href=data:,>{known.page._repr_html_()}", encoding="utf-8"
    )
    page = visit(outer)
    frame = page.frame_locator("iframe")
    frame.locator("html[data-ready=yes]").wait_for(state="attached")
    frame.locator("#keys").press("ArrowUp")
    assert frame.locator("#matches tbody tr").count() == 3


def test_a_page_that_frames_it_is_told_the_height_of_all_controls(browser, known, tmp_path):
    outer = tmp_path / "outer.html"
    outer.write_text(
        f"""<iframe src="{known.path.as_uri()}" width="900" height="300"></iframe><script>
        addEventListener("message", ({{ data }}) => {{ window.told = data.scramExplorerHeight; }});
        </script>"""
    )
    page = browser.new_page()
    page.goto(outer.as_uri())
    page.wait_for_function("window.told > 0")
    frame = page.frames[1]
    settle(frame)
    bottom = frame.locator("#png").bounding_box()
    top = page.locator("iframe").bounding_box()["y"]
    assert bottom["y"] + bottom["height"] - top <= page.evaluate("window.told") < 4000
    page.close()
