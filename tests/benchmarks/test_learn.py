"""Each task of benchmarks/learn in its smallest form: the loss falls, and an interrupted run ends as a whole one."""

import importlib
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TASKS = ("classify", "detect, 128x128", "video", "generate, MNIST", "generate, CIFAR-10")


@pytest.fixture(scope="module")
def learn():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        names = ("attentions", "boxes", "captured", "data", "loop", "plans", "report", "speed", "tasks", "work")
        yield {name: importlib.import_module(f"learn.{name}") for name in names}


@pytest.fixture(scope="module")
def tasks(learn):
    found = learn["tasks"].tasks(learn["data"].made_up(side=8))
    return {name: learn["tasks"].tiny(task) for name, task in found.items()}


@pytest.mark.parametrize("name", TASKS)
def test_the_loss_falls(learn, tasks, name):
    """With SCRAM; on films its windows alone, whose kernels of three axes the generation of colors needs too."""
    task = replace(tasks[name], steps=50)
    _, row = learn["loop"].train(task, learn["loop"].Run(name, "windows" if name == "video" else "tail", 0))
    (_, first), (_, last) = row["curve"]
    assert last < first
    assert all(math.isfinite(x) for x in row["test"].values())


@pytest.mark.parametrize("attention", ["tail", "dense, dropout"])
def test_an_interrupted_run_gives_the_same_numbers(learn, tasks, attention, tmp_path):
    task, run = replace(tasks["classify"], steps=50), learn["loop"].Run("classify", attention, 3)
    _, whole = learn["loop"].train(task, run)
    file = tmp_path / "run.pt"
    assert learn["loop"].train(task, run, checkpoint=file, stop=25)[1] is None
    torch.manual_seed(99)
    _, resumed = learn["loop"].train(task, run, checkpoint=file)
    assert resumed["curve"] == whole["curve"]
    assert resumed["test"] == whole["test"]
    assert not file.exists()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("grid", [(12, 21), (4, 6, 10)])
def test_local_attention_is_dense_attention_under_its_mask(learn, grid, causal):
    local = learn["attentions"].Local(16, 2, causal, keys=64)
    x = torch.randn(2, *grid, 16)
    out = local(x)
    moved = x.clone()
    corner = (slice(None), *(-1 for _ in grid))
    moved[corner] += 1
    same = (local(moved) == out).all(-1)
    assert same[(slice(None), *(0 for _ in grid))].all()  # far from what has moved
    assert not same[corner].any()
    # A block that holds the whole grid is dense attention.
    whole = learn["attentions"].Local(16, 2, causal, keys=10**6)
    whole.load_state_dict(local.state_dict())
    q, k, v = whole.inner(x).flatten(1, -2).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
    dense = whole.outer(F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(-2))
    torch.testing.assert_close(whole(x), dense.view(x.shape))
    if causal:
        assert same[:, 0].all()
        assert same.flatten(1)[:, :-1].all()


def test_strided_attention_is_dense_attention_along_lines(learn):
    layer = learn["attentions"].Strided(16, 2, False)
    q, k, v = torch.randn(3, 1, 2, 5, 6, 8)
    out = layer.mix(q, k, v)
    row = F.scaled_dot_product_attention(q[0, 0, 3], k[0, 0, 3], v[0, 0, 3])
    column = F.scaled_dot_product_attention(q[0, 1, :, 2], k[0, 1, :, 2], v[0, 1, :, 2])
    torch.testing.assert_close(out[0, 0, 3], row)
    torch.testing.assert_close(out[0, 1, :, 2], column)


@pytest.mark.parametrize("attention", ["dense", "local", "strided"])
def test_no_pixel_sees_itself_or_a_later_one(learn, tasks, attention):
    task = tasks["generate, MNIST"]
    model = task.model(attention).eval()
    x, _ = task.drawn(torch.Generator().manual_seed(0), 2, False)
    later = x.clone().flatten(1)
    later[:, 60:] = (later[:, 60:] + 7) % task.levels
    torch.manual_seed(0)
    a = model(x).flatten(1, -2)
    torch.manual_seed(0)
    b = model(later.view(x.shape)).flatten(1, -2)
    torch.testing.assert_close(a[:, :61], b[:, :61])
    assert (a[:, 61:] != b[:, 61:]).any()


def test_average_precision_of_known_boxes(learn):
    boxes = learn["boxes"]
    there = boxes.Objects(torch.tensor([[[0.0, 0, 10, 10], [20, 20, 40, 40]]]), torch.tensor([[3, 3]]))
    places = torch.tensor([[[0.0, 0, 10, 10], [21, 20, 40, 40], [0, 0, 10, 10]]])

    def found(classes, scores):
        return boxes.Found(places, torch.tensor([classes]), torch.tensor([scores]))

    assert boxes.average_precision([(found([3, 3, 3], [0.9, 0.8, 0.7]), there)]) == 1.0
    assert boxes.average_precision([(found([3, 4, 3], [0.9, 0.8, 0.7]), there)]) == 0.5
    # The same box twice: the second is wrong, and stands before the other digit.
    twice = boxes.Found(places[:, [0, 2, 1]], torch.tensor([[3, 3, 3]]), torch.tensor([[0.9, 0.8, 0.7]]))
    assert boxes.average_precision([(twice, there)]) == pytest.approx(0.5 + 0.5 * 2 / 3)


def test_what_tokens_are_asked_for_is_what_boxes_are_found(learn, tasks):
    """Outputs made of the targets give a mean average precision of one."""
    task, boxes = tasks["detect, 128x128"], learn["boxes"]
    _, objects = task.drawn(torch.Generator().manual_seed(0), 16, True)
    side = task.size // 2
    classes, wanted = boxes.assigned(objects, side, task.size)
    points = boxes._centers(side, task.size, wanted.device)
    distance = torch.cat([points - wanted[..., :2], wanted[..., 2:] - points], -1).clamp(min=0.1)
    scores = torch.where(F.one_hot(classes.clamp(min=0), 10) * (classes >= 0).unsqueeze(-1) > 0, 9.0, -9.0)
    out = torch.cat([scores, (distance / 12).log()], -1).unflatten(1, (side, side))
    shown = int((objects.classes >= 0).sum())
    assert shown > 8
    assert boxes.average_precision([(boxes.found_boxes(out, task.size), objects)]) > 0.95
    assert float(task.loss(out, objects)) < 0.05


def test_samples_are_levels(learn, tasks):
    task = tasks["generate, MNIST"]
    task = replace(task, data=replace_size(task.data, 6))
    found = task.samples(task.model("tail").eval(), 2, torch.Generator().manual_seed(0))
    assert found.shape == (2, 6, 6)
    assert 0 <= found.min() <= found.max() < 256


def replace_size(data, side):
    return type(data)(data.x[:, :side, :side], data.y, data.test_x[:, :side, :side], data.test_y)


def test_the_command_stores_runs_and_shows_them(learn, tmp_path, capsys, monkeypatch):
    main = importlib.import_module("learn.__main__")
    common = ["--results", str(tmp_path), "--checkpoints", str(tmp_path / "c"), "--tiny", "--device", "cpu"]
    for attention in ("dense", "tail"):
        argv = ["learn", "train", "plain", "--attention", attention, "--pictures", "20", *common]
        monkeypatch.setattr("sys.argv", argv)
        main.main()
    monkeypatch.setattr("sys.argv", ["learn", "table", "--results", str(tmp_path)])
    main.main()
    shown = capsys.readouterr().out
    assert "| plain | tail | 20 | 1 | accuracy" in shown


@pytest.mark.parametrize("attention", ["tail", "windows", "tail, fixed seed"])
def test_seeds_on_the_device_are_drawn_at_every_call(learn, attention):
    """As a CUDA graph needs them: what the seeds are is read when the search runs, not when it is set up."""
    torch.manual_seed(0)
    layer = learn["attentions"].attention(attention, 16, 2).eval()
    model, x = torch.nn.Sequential(layer), torch.randn(1, 40, 40, 16)
    learn["captured"].seeds_on_device(model)
    a, b = model(x), model(x)
    assert torch.equal(a, b) == (attention == "tail, fixed seed")
    torch.manual_seed(5)
    c = model(x)
    torch.manual_seed(5)
    assert torch.equal(model(x), c)


def test_workers_make_each_run_once(learn, tasks, tmp_path, capsys):
    plans, work = learn["plans"], learn["work"]
    every = [run for question in plans.QUESTIONS for run in plans.runs(question)]
    waiting = work.wanted(("noise", "bias"), ["plain"], tmp_path)
    assert len(waiting) == len({run.name for run in waiting}) == 3 * 3 * 7
    assert {run.task for run in every} <= set(tasks)
    mine = [run for run in waiting if run.attention.startswith("dense") and run.pictures == 1000 and not run.seed]
    (tmp_path / mine[0].file).touch()  # taken by another
    few = {name: replace(task, steps=25) for name, task in tasks.items()}
    for _ in range(2):
        work.work(mine, few, tmp_path, tmp_path, tmp_path / "c", "x", 1, math.inf)
    shown = capsys.readouterr().out
    assert shown.count("training accuracy") == 1
    assert list(learn["loop"].stored(tmp_path)) == [mine[1].name]
    assert work.wanted(("noise",), ["plain"], tmp_path).count(mine[1]) == 0


def test_pictures_of_half_the_side(learn):
    x = torch.tensor([[0, 2, 8, 8], [4, 6, 8, 9]], dtype=torch.uint8).view(1, 2, 4, 1)
    found = learn["data"].Set(x, torch.zeros(1), x, torch.zeros(1)).halved()
    assert found.x.flatten().tolist() == [3, 8]
    assert found.x.shape == (1, 1, 2, 1)


def test_bits_position_by_position_are_those_of_the_whole_call(learn, tasks):
    task = tasks["generate, CIFAR-10"]
    assert math.prod(task.grid) == 3 * 64  # the last stretches see clusters
    torch.manual_seed(0)
    found = task.decoded_by(task.model("causal clusters, few").eval(), 3)
    assert math.isclose(found["bits, whole"], found["bits, decoded"], rel_tol=1e-5)
