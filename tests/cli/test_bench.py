"""`scram bench`: rows that are kept, resumed, refused; a table and a plot."""

import json
import math
from time import perf_counter, sleep

import pytest
import torch
from rich.progress import Progress

from scram.cli import bench as bench_module
from scram.cli import measuring, rivals
from support.command import call

pytestmark = pytest.mark.slow


def few(monkeypatch, *names):
    monkeypatch.setattr(rivals, "ATTENTIONS", {name: rivals.ATTENTIONS[name] for name in names})


def test_bench_writes_rows_a_table_and_a_plot(tmp_path, monkeypatch):
    few(monkeypatch, "SCRAM", "torch SDPA", "strided")
    code, printed, complaints = call(
        "bench", "--sizes", "16,64", "--widths", 3, "--parts", "forward,backward", "--out", tmp_path
    )
    assert (code, complaints) == (0, "")
    for word in ("SCRAM", "torch SDPA", "strided", "64x64", "slope"):
        assert word in printed
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert len(rows) == 3 * 2 * 2
    for row in rows.values():
        assert row["seconds"] > 0
        assert row["machine"]["versions"]["torch"] == torch.__version__
        assert {"commit", "date", "data", "peak_bytes"} <= set(row)
    assert 0 <= rows["attention SCRAM 64 E3"]["output_error"] < 0.5
    assert rows["attention torch SDPA 64 E3"]["output_error"] < 1e-3
    assert (tmp_path / "bench.png").stat().st_size > 10_000


def test_a_busy_machine_is_seen_in_the_table(tmp_path, monkeypatch):
    few(monkeypatch, "torch SDPA")
    real, steady = measuring.run, [True]
    monkeypatch.setattr(measuring, "run", lambda *given: {**real(*given), "steady": steady[0]})
    given = ("bench", "--sizes", "16", "--widths", 3, "--parts", "forward", "--out")
    assert "?" not in call(*given, tmp_path / "quiet")[1]
    steady[0] = False
    assert "?: repeated times differ by more than a third" in " ".join(call(*given, tmp_path / "busy")[1].split())
    row = json.loads((tmp_path / "busy" / "bench.json").read_text())["rows"]["attention torch SDPA 16 E3"]
    assert row["cpu_seconds"] > 0


def test_search_alone_reaches_the_recall_asked(tmp_path):
    pytest.importorskip("faiss")
    code, printed, _ = call("bench", "--sizes", "24", "--widths", 16, "--parts", "search", "--json", "--out", tmp_path)
    assert code == 0
    rows = json.loads(printed)["rows"]
    for name in ("faiss flat", "faiss HNSW"):
        row = rows[f"search {name} 24 E16"]
        assert row["recall"] >= row["recall_asked"] == rows["search SCRAM 24 E16"]["recall"]


def test_interrupt_keeps_rows_and_resume_goes_on(tmp_path, monkeypatch):
    few(monkeypatch, "torch SDPA", "full attention", "strided", "fixed")
    real, made = measuring.run, []

    def run(case, *rest):
        if len(made) == 2 and not (tmp_path / "again").exists():
            raise KeyboardInterrupt
        made.append(case.contender)
        return real(case, *rest)

    monkeypatch.setattr(measuring, "run", run)
    arguments = ("bench", "--sizes", "16", "--widths", 3, "--parts", "forward", "--out", tmp_path)
    code, _, complaints = call(*arguments)
    assert code == bench_module.INTERRUPTED
    assert "--resume" in complaints
    assert len(json.loads((tmp_path / "bench.json").read_text())["rows"]) == 2
    (tmp_path / "again").write_text("")
    assert call(*arguments, "--resume")[0] == 0
    assert len(json.loads((tmp_path / "bench.json").read_text())["rows"]) == 4
    assert made == ["torch SDPA", "full attention", "strided", "fixed"]  # none of them twice


def test_out_of_memory_is_a_row(tmp_path, monkeypatch):
    def hungry(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 EiB")

    few(monkeypatch, "torch SDPA", "full attention")
    monkeypatch.setitem(rivals.ATTENTIONS, "torch SDPA", hungry)
    monkeypatch.setattr(rivals, "peak_bytes", lambda name, points: 1 << 60 if name == "full attention" else 0)
    code, printed, _ = call("bench", "--sizes", "16", "--widths", 3, "--parts", "forward", "--out", tmp_path)
    assert code == 0
    assert printed.count("no memory") >= 2
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert all("out of memory" in row["failed"] for row in rows.values())


def test_a_row_that_does_not_end_is_a_row(tmp_path, monkeypatch):
    def endless(*_):
        while True:
            pass

    few(monkeypatch, "torch SDPA", "strided")
    monkeypatch.setitem(rivals.ATTENTIONS, "torch SDPA", endless)
    monkeypatch.setattr(bench_module, "ROW", 1.5)
    code, printed, _ = call("bench", "--sizes", "16", "--widths", 3, "--parts", "forward", "--out", tmp_path)
    assert code == 0
    assert "failed" in printed
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert rows["attention torch SDPA 16 E3"]["failed"] == "not finished in 1.5 s"
    assert rows["attention strided 16 E3"]["seconds"] > 0


def test_budget_is_kept_and_resume_measures_the_rest(tmp_path, monkeypatch):
    few(monkeypatch, "torch SDPA", "strided", "fixed")
    arguments = ("bench", "--sizes", "16", "--widths", 3, "--parts", "forward", "--out", tmp_path)
    code, _, complaints = call(*arguments, "--budget", 0)
    assert code == 2
    assert "no time to measure anything" in complaints
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert [row["skipped"] for row in rows.values()] == [measuring.LATE] * 3
    rows.pop("attention strided 16 E3")
    measured = call(*arguments[:-1], tmp_path / "one", "--json")[1]
    rows["attention strided 16 E3"] = json.loads(measured)["rows"]["attention strided 16 E3"]
    (tmp_path / "bench.json").write_text(json.dumps({"rows": rows}))
    code, printed, _ = call(*arguments, "--resume", "--budget", 0)
    assert code == 0
    assert "2 rows were left for lack of time: forward (16x16)\n" in printed
    assert call(*arguments, "--resume")[0] == 0
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert all(row["seconds"] > 0 for row in rows.values())


def test_a_row_that_takes_long_ends_with_the_budget(tmp_path, monkeypatch):
    """Nothing is known of its time before: it may compile, as the first row of every contender."""

    def endless(*_):
        end = perf_counter() + 20
        while perf_counter() < end:
            sleep(0.01)

    few(monkeypatch, "torch SDPA", "strided", "fixed")
    monkeypatch.setitem(rivals.ATTENTIONS, "strided", endless)
    start = perf_counter()
    code, printed, _ = call(
        "bench", "--sizes", "16,32", "--widths", 3, "--parts", "forward,search", "--out", tmp_path, "--budget", 3
    )
    assert code == 0
    assert perf_counter() - start < 12  # the rest is drawing
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert rows["attention torch SDPA 16 E3"]["seconds"] > 0
    late = [name for name, row in rows.items() if row.get("skipped") == measuring.LATE]
    assert "attention strided 16 E3" in late
    assert len(late) == len(rows) - 1
    assert f"{len(late)} rows were left for lack of time" in printed
    assert "forward (16x16, 32x32), search (16x16, 32x32)" in printed


def test_time_left_is_at_most_the_budget():
    progress = Progress()
    progress.add_task("", total=10)
    task = progress.tasks[0]
    task.start_time, task.get_time = 0.0, lambda: 40.0
    assert bench_module.TimeLeft(100.0).render(task).plain == "1:00"
    assert bench_module.TimeLeft(10.0).render(task).plain == "0:00"
    assert bench_module.TimeLeft(math.inf).render(task).plain == "-:--"


def test_stored_results_show_the_slopes():
    """The paper's claim, on the rows that the documents show."""
    for name, width in (("bench_cpu", 3), ("bench_gpu", 64)):
        path = bench_module.Path(__file__).parents[2] / "benchmarks" / "results" / f"{name}.json"
        rows = list(json.loads(path.read_text())["rows"].values())
        found = bench_module.slopes(rows)
        ours = {r["contender"] for r in rows if r["contender"].startswith("SCRAM") and r["kind"] == "attention"}
        assert "SCRAM, paper" in ours
        assert all(found[f"attention {width} False {contender}"] <= 1.15 for contender in ours)
        assert found[f"attention {width} False full attention"] >= 1.9
        if name == "bench_gpu":  # where the map does not fit, and small calls cost what a launch costs
            assert found[f"attention {width} False torch SDPA"] >= 1.9
            large = [r for r in rows if r["size"] >= 512]
            steep = bench_module.slopes(large)
            assert all(steep[f"attention {width} False {contender}"] <= 1.15 for contender in ours)
        largest = max(r["size"] for r in rows if r["contender"] == "SCRAM, paper" and "seconds" in r)
        assert largest >= (512 if name == "bench_cpu" else 2048)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--sizes", "a,b"), "sizes must be whole numbers"),
        (("--sizes", "8"), "sizes must be 16 or more"),
        (("--parts", "sideways"), "parts must be some of"),
        (("--device", "tpu"), "device must be cpu or cuda"),
    ],
)
def test_bench_refuses_in_one_line(arguments, words, tmp_path):
    code, printed, complaints = call("bench", *arguments, "--out", tmp_path)
    assert (code, printed) == (2, "")
    assert words in complaints
    assert complaints.count("\n") == 1
