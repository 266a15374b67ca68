"""Charts of benchmark rows: which lines they hold."""

from matplotlib.figure import Figure

from scram.cli import charts


def row(size, contender="SCRAM, paper", **more):
    machine = {"gpu": None, "threads": 1, "cpu": "a CPU"}
    given = {"kind": "attention", "contender": contender, "size": size, "width": 3, "backward": False}
    return {**given, "least": 1e-6 * size**2, "device": "cpu", "machine": machine, **more}


def test_rows_form_series_by_size():
    rows = [row(128), row(64), row(64, "torch SDPA"), row(64, backward=True)]
    found = charts.series(rows)
    assert set(found) == {
        ("attention", 3, False, "SCRAM, paper"),
        ("attention", 3, True, "SCRAM, paper"),
        ("attention", 3, False, "torch SDPA"),
    }
    assert [one["size"] for one in found["attention", 3, False, "SCRAM, paper"]] == [64, 128]


def drawn(rows, quantity="least"):
    axes = Figure().add_subplot()
    charts._loglog(axes, {key[3]: some for key, some in charts.series(rows).items()}, quantity)
    return axes


def test_a_line_holds_its_points_and_its_slope():
    axes = drawn([row(64), row(128), row(256)])
    (line,) = axes.lines
    assert line.get_xdata().tolist() == [64**2, 128**2, 256**2]
    assert "slope 1.00" in line.get_label()


def test_what_found_no_memory_is_said_and_what_was_not_measured_is_hollow():
    failed = row(256, failed="out of memory: 1", least=None)
    assert "no memory for 256" in drawn([row(64), row(128), failed]).lines[0].get_label()
    known, continued = drawn([row(64), row(128), row(256, least=None, about=9.0)]).lines
    assert known.get_xdata().tolist() == [64**2, 128**2]
    assert continued.get_ydata()[-1] == 9.0
    assert continued.get_markerfacecolor() == "white"


def test_errors_are_drawn_without_slopes_and_without_what_is_exact():
    rows = [row(64, output_error=0.2), row(128, output_error=0.1), row(64, "torch SDPA", output_error=1e-7)]
    (line,) = drawn(rows, "output_error").lines
    assert line.get_label() == "SCRAM, paper"
    assert line.get_ydata().tolist() == [0.2, 0.1]


def test_pairs_share_a_color():
    axes = Figure().add_subplot()
    points = {name: [(0, 1.0), (1, 2.0)] for name in ("a", "b", "c", "d")}
    charts.lines(axes, points, "title", "x", "y", pairs=True)
    first, second, third, _ = axes.lines
    assert first.get_color() == second.get_color() != third.get_color()
    assert (first.get_linestyle(), second.get_linestyle()) == ("--", "-")


def test_a_picture_is_written(tmp_path):
    rows = [row(64), row(128), row(64, peak_bytes=2**20), row(128, width=64)]
    charts.performance(rows, tmp_path / "chart.png", tmp_path / "more.png")
    assert all((tmp_path / name).stat().st_size > 10_000 for name in ("chart.png", "more.png"))


def test_settings_of_a_family_are_joined_and_dense_attention_is_a_line():
    points = [
        charts.Point("sdpa", "sdpa", 0, 1.0, 0.0),
        charts.Point("scram-clusters-512", "scram-clusters", 512, 0.4, 0.02),
        charts.Point("scram-clusters-128", "scram-clusters", 128, 0.1, 0.2),
        charts.Point("mine:f", "mine:f", 0, 3.0, 1e-9),
    ]
    axes = Figure().add_subplot()
    styles = charts.error_against_time(axes, points)
    dense, clusters, mine = axes.lines
    assert list(dense.get_xdata()) == [1, 1]
    assert clusters.get_xdata().tolist() == [0.1, 0.4]
    assert clusters.get_ydata().tolist() == [0.2, 0.02]
    assert mine.get_ydata().tolist() == [charts.LEAST_ERROR]
    assert (clusters.get_label(), mine.get_label()) == ("SCRAM, clusters", "mine:f")
    assert styles["scram-clusters"][0] == clusters.get_color() != mine.get_color()
    low, high = axes.get_xlim()
    assert low < 0.1 < 3 < high
