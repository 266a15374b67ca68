"""`scram figures`: the paper's pictures, drawn from real runs, each with a number that tests its claim."""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.exact import exact_attention
from ..functional import attend, search
from ..images.resample import own_places
from ..quality import measure
from ..results import Matches
from ..settings import Search
from . import charts, pictures
from .console import Numbers, Printout, counted, explained, numbers_table, progress
from .features import PatchFeatures, sample_pair
from .pair import find, pair_of
from .pictures import INK, Panel
from .provenance import made_with
from .sets import tensor_sets

SIDE = 128  # of the maps of (a)
RANK = 4
SHARPNESS = 12.0  # of the maps of (a): the picture's contrast, in nats
SWEEPS = (0, 1, 2, 4, 8)
SAMPLE = 500
# Of the maps of (b): queries whose blobs are counted, how often, and the ways to make features and to keep apart.
QUERIES = 60
SEEDS = 5
MODES_SCALE = 150.0
KAPPA = 4
SEPARATION = 6
SMOOTHINGS = (1, 3, 5)
SEPARATIONS = (4, 6, 10)


def run(out: Path, names: list[str], size: int, data: Path | None, seed: int) -> Printout:
    """Draw the figures of these names and collect the numbers that test their claims."""
    makers: dict[str, Callable[[Path], Numbers]] = {
        "maps": lambda path: maps(path, seed),
        "modes": lambda path: modes(path, size, seed),
        "sweeps": lambda path: sweeps(path, size, seed),
        "curves": lambda path: curves(path, size, seed, data),
    }
    numbers: Numbers = {**made_with("cpu"), "size": size, "seed": seed}
    with progress() as step:
        for name in names:
            step(f"figure {name}")
            numbers[name] = makers[name](out / f"{name}.png")
    measures = {"sweeps": ("recall@1",), "curves": ("recall@1", "captured mass")}
    used = dict.fromkeys(measure for name in names for measure in measures.get(name, ()))
    rows = [(name, claim, f"{value:.3f}") for name in names for claim, value in numbers[name]["claims"].items()]
    headings = ("figure", "claim", "measured")
    title = "The paper's claims, tested"
    table = numbers_table(headings, rows, title, explained(*used), left=2)
    return Printout(numbers, [table], f"figures: {', '.join(str(out / f'{name}.png') for name in names)}")


def low_rank(side: int = SIDE, rank: int = RANK) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys `[1, 1, side, 1, rank]` whose products are the best rank-4 copy of a photograph, and that."""
    gray = sample_pair(side)[0].mean(-1)
    left = (gray.shape[1] - side) // 2
    picture = gray[:, left : left + side]
    picture = (picture - picture.mean()) / picture.std()
    u, s, vh = torch.linalg.svd(picture)
    root = s[:rank].sqrt()
    q = u[:, :rank] * root
    k = vh[:rank].T * root
    return q[None, None, :, None].contiguous(), k[None, None, :, None].contiguous(), picture


def maps(path: Path, seed: int = 0) -> Numbers:
    """(a) The whole attention map against the sparse ones, 128 queries and keys on a line."""
    q, k, _ = low_rank()
    scale = SHARPNESS / 4
    one_hot = torch.eye(SIDE, dtype=torch.float32, device="cpu")[None, None, :, None]
    full = exact_attention(q, k, one_hot, scale=scale).out[0, 0, :, 0]
    shown = {"full attention": full}
    claims = {}
    for name, settings, radius in (
        ("top-8 max", Search(matches=8, seed=seed), 0),
        ("top-4 mode, L = 8, b = 1", Search(matches=4, separation=8, seed=seed), 1),
    ):
        sparse = attend(q, k, one_hot, search(q, k, search=settings), radius=radius, scale=scale).out[0, 0, :, 0]
        shown[name] = sparse
        holds = sparse.gather(1, full.argmax(1, keepdim=True)) > 0
        claims[f"rows whose maximum is in the {name} map"] = float(holds.float().mean())
        claims[f"share of the map kept by {name}"] = float((full * (sparse > 0)).sum(1).mean())
    title = f"Attention maps of {SIDE} queries and keys, the rank-{RANK} SVD of a photograph"
    figure = charts.new_figure(15, 4.9, title)
    most = float(full.max().sqrt())
    for place, (name, one) in enumerate(shown.items()):
        axes = figure.add_subplot(1, 3, place + 1)
        image = axes.imshow(one.sqrt().numpy(), cmap="cividis", vmin=0, vmax=most, interpolation="nearest")
        axes.set_title(f"{name}: {int((one > 0).sum(1).float().mean())} keys a row", loc="left", fontsize=11, color=INK)
        axes.set(xlabel="key", ylabel="query")
    bar = figure.colorbar(image, ax=figure.axes, shrink=0.8, label="attention p (color by its square root)")
    ticks = [t for t in (0, 0.01, 0.05, 0.2, 0.5, 1) if t <= float(full.max())]
    bar.set_ticks([t**0.5 for t in ticks], labels=[f"{t:g}" for t in ticks])
    figure.savefig(path)
    return {"scale": scale, "claims": claims}


def blobs(weights: Tensor, share: float = 0.1) -> Tensor:
    """Number the connected regions where the weights `[H, W]` reach a share of their maximum; 0 elsewhere."""
    inside = weights >= share * weights.max()
    number = torch.arange(1, weights.numel() + 1, device=weights.device).reshape(weights.shape)
    labels = torch.where(inside, number, 0).float()
    while True:
        spread = torch.where(inside, F.max_pool2d(labels[None, None], 3, 1, 1)[0, 0], 0)
        if torch.equal(spread, labels):
            return labels.long()
        labels = spread


def modes(path: Path, size: int, seed: int = 0) -> Numbers:
    """(b) One query's attention over a picture: kappa keys anywhere, or kappa keys that keep their distance."""
    a, _ = sample_pair(max(32, size // 2))
    rows = []
    drawn = None
    for smoothing in SMOOTHINGS:
        x = _smooth_features(a, smoothing)
        counts: dict[int, list[Tensor]] = {apart: [] for apart in (0, *SEPARATIONS)}
        for one in range(seed, seed + SEEDS):
            queries, labels, full = _mapped(x, one)
            mixed = [len(set(label.flatten().tolist()) - {0}) > 1 for label in labels]
            several = torch.tensor(mixed, dtype=torch.bool, device="cpu")
            by_separation = {n: search(x, x, search=Search(matches=KAPPA, separation=n, seed=one)) for n in counts}
            touched = {n: _touched(matches, queries, labels) for n, matches in by_separation.items()}
            for n, count in touched.items():
                counts[n].append(count[several])
            if smoothing == SMOOTHINGS[-1] and one == seed:
                chosen = int((touched[SEPARATION] - touched[0]).argmax())
                place = divmod(int(queries[chosen]), a.shape[1])
                shown = {n: int(touched[n][chosen]) for n in (0, SEPARATION)}
                drawn = (full[chosen], labels[chosen], _sparse(x, {n: by_separation[n] for n in shown}, place))
        anywhere = torch.cat(counts.pop(0)).float()
        for n, some in counts.items():
            apart = torch.cat(some).float()
            rows.append(
                {
                    "smoothing": smoothing,
                    "separation": n,
                    "queries": len(apart),
                    "blobs_anywhere": float(anywhere.mean()),
                    "blobs_apart": float(apart.mean()),
                    "apart_more": float((apart > anywhere).float().mean()),
                    "apart_fewer": float((apart < anywhere).float().mean()),
                }
            )
    assert drawn is not None
    _draw_modes(path, a, *drawn, place, shown)
    main = next(row for row in rows if (row["smoothing"], row["separation"]) == (SMOOTHINGS[-1], SEPARATION))
    names = {
        "blobs_anywhere": f"blobs touched by top-{KAPPA} max, mean",
        "blobs_apart": f"blobs touched by top-{KAPPA} mode, L = {SEPARATION}, mean",
        "apart_more": "queries of which top-mode touches more blobs",
        "apart_fewer": "queries of which top-mode touches fewer blobs",
    }
    return {
        "sampled": QUERIES,
        "seeds": SEEDS,
        "scale": MODES_SCALE,
        "kappa": KAPPA,
        "separation": SEPARATION,
        "radius": 1,
        "query": place,
        "shown": {"anywhere": shown[0], "apart": shown[SEPARATION]},
        "rows": rows,
        "claims": {name: main[key] for key, name in names.items()},
    }


def _smooth_features(a: Tensor, side: int) -> Tensor:
    """Patch features averaged over side x side pixels, unit norm: what is alike forms blobs and not dots."""
    features = PatchFeatures.fit(a, 8, 9, stride=2)(a)
    smooth = F.avg_pool2d(features[0].movedim(-1, 1), side, 1, side // 2, count_include_pad=False).movedim(1, -1)
    return F.normalize(smooth, dim=-1)[None].contiguous()


def _mapped(x: Tensor, seed: int) -> tuple[Tensor, list[Tensor], Tensor]:
    """Some queries, the blobs of their attention, and that attention `[queries, H, W]`."""
    height, width = x.shape[2:4]
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randperm(height * width, generator=generator, device="cpu")[:QUERIES]
    flat = x[0, 0].flatten(0, 1)
    full = (MODES_SCALE * flat[queries] @ flat.T).softmax(-1).reshape(-1, height, width)
    return queries, [blobs(weights) for weights in full], full


def _touched(matches: Matches, queries: Tensor, labels: list[Tensor]) -> Tensor:
    """How many blobs of each query hold a key of the windows of radius 1 around its matches."""
    width = matches.key_grid[1]
    counts = []
    for index, label in zip(matches.index[0, 0].flatten(0, 1)[queries], labels, strict=True):
        seen: set[int] = set()
        for row, column in (divmod(int(one), width) for one in index if one >= 0):
            seen |= set(label[max(row - 1, 0) : row + 2, max(column - 1, 0) : column + 2].flatten().tolist())
        counts.append(len(seen - {0}))
    return torch.tensor(counts, dtype=torch.int64, device="cpu")


def _sparse(x: Tensor, by_separation: dict[int, Matches], place: tuple[int, int]) -> dict[int, Tensor]:
    """The attention of the query at that place over the windows of its matches, as maps `[H, W]`."""
    height, width = x.shape[2:4]
    row, column = (slice(n, n + 1) for n in place)
    one_hot = torch.eye(height * width, dtype=torch.float32, device="cpu").reshape(1, 1, height, width, -1)
    maps = {}
    for n, matches in by_separation.items():
        index, score = (y[:, :, row, column].contiguous() for y in (matches.index, matches.score))
        of_query = Matches(index, score, matches.key_grid)
        out = attend(x[:, :, row, column].contiguous(), x, one_hot, of_query, radius=1, scale=MODES_SCALE).out
        maps[n] = out.reshape(height, width)
    return maps


def _draw_modes(
    path: Path,
    a: Tensor,
    full: Tensor,
    label: Tensor,
    sparse: dict[int, Tensor],
    place: tuple[int, int],
    counts: dict[int, int],
) -> None:
    title = "One query's attention over a photograph: its best keys anywhere, or apart (outlined: the blobs)"
    figure = charts.new_figure(15, 3.1, title)
    first = figure.add_subplot(1, 4, 1)
    first.imshow(a.numpy(), interpolation="nearest")
    first.set_title("photograph, and the query", loc="left", color=INK, fontsize=11)
    shown = {"full attention": full}
    for n, one in sparse.items():
        kind = f"mode, L = {n}" if n else "max"
        shown[f"top-{KAPPA} {kind}: {counted(counts[n], 'blob')}"] = one
    for number, (name, one) in enumerate(shown.items()):
        axes = figure.add_subplot(1, 4, number + 2)
        image = axes.imshow((one / one.max()).sqrt().numpy(), cmap="cividis", vmin=0, vmax=1, interpolation="nearest")
        axes.contour((label > 0).float().numpy(), levels=[0.5], colors="white", linewidths=0.8)
        axes.set_title(name, loc="left", color=INK, fontsize=11)
    for axes in figure.axes:
        axes.plot(place[1], place[0], "+", color="#D55E00", markersize=13, markeredgewidth=2)
        axes.set_axis_off()
    figure.colorbar(image, ax=figure.axes, shrink=0.9, label="√(p / largest p)")
    figure.savefig(path)


def sweeps(path: Path, size: int, seed: int = 0) -> Numbers:
    """(c) The match field of two photographs after 0, 1, 2, 4, 8 sweeps of the paper's search."""
    a, b = sample_pair(size)
    pair = pair_of(a, b)
    fields = {}
    recall = {}
    for count in SWEEPS:
        settings = Search(sweeps=count, propagate="shift", gossip=0, seed=seed)
        result = find(pair, settings)
        fields[count] = result.warp - own_places(*a.shape[:2]).flip(-1)
        recall[count] = float(measure.recall(pair.q, pair.k, result.matches, num_queries=SAMPLE, seed=seed))
    limit = pictures.wheel_limit(fields[SWEEPS[-1]])
    panels = [Panel("Photograph A", a, "the other is a frame of the same camera pan")]
    for count, field in fields.items():
        legend = pictures.wheel_legend(limit) if count == SWEEPS[-1] else None
        note = f"recall@1 {recall[count]:.2f}"
        panels.append(Panel(counted(count, "sweep"), pictures.wheel_colors(field, limit), note, legend))
    pictures.sheet(panels, path, "Spatial coherence: good matches spread from neighbor to neighbor")
    return {"claims": {f"recall@1 after {counted(count, 'sweep')}": value for count, value in recall.items()}}


def curves(path: Path, size: int, seed: int = 0, data: Path | None = None) -> Numbers:
    """(d) Recall against sweeps, captured mass against kappa and b, on several kinds of tensors."""
    kinds = tensor_sets(size, data)
    lines: dict[str, dict[str, list[tuple[int, float]]]] = {"recall": {}, "kappa": {}, "radius": {}}
    for name, (q, k, scale) in kinds.items():

        def mass(kappa: int, radius: int, q: Tensor = q, k: Tensor = k, scale: float = scale) -> float:
            matches = search(q, k, search=Search(matches=kappa, seed=seed))
            attended = attend(q, k, k[..., :1].contiguous(), matches, radius=radius, scale=scale)
            return float(measure.captured_mass(q, k, attended, scale=scale, num_queries=SAMPLE, seed=seed).mean())

        for label, base in (("paper", Search.paper(seed=seed)), ("default", Search(seed=seed))):
            points = []
            for count in SWEEPS:
                settings = Search(sweeps=count, propagate=base.propagate, gossip=base.gossip, seed=seed)
                matches = search(q, k, search=settings)
                points.append((count, float(measure.recall(q, k, matches, num_queries=SAMPLE, seed=seed).mean())))
            lines["recall"][f"{name}, {label}"] = points
        lines["kappa"][name] = [(kappa, mass(kappa, 1)) for kappa in (1, 2, 4, 8)]
        lines["radius"][name] = [(radius, mass(1, radius)) for radius in (0, 1, 2, 4)]
    figure = charts.new_figure(17, 5.4, "What the search finds and what its windows hold")
    titles = {
        "recall": ("Recall@1 against sweeps", "sweeps T", "share of queries with their best key"),
        "kappa": ("Captured mass against matches, b = 1", "matches per query κ", "share of the exact softmax"),
        "radius": ("Captured mass against the window, κ = 1", "window radius b", "share of the exact softmax"),
    }
    for place, (name, (title, x, y)) in enumerate(titles.items()):
        axes = figure.add_subplot(1, 3, place + 1)
        charts.lines(axes, lines[name], title, x, y, pairs=name == "recall")
        axes.set_ylim(-0.02, 1.02)
        axes.set_xticks([n for n, _ in next(iter(lines[name].values()))])
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, fontsize=9, frameon=False)
    figure.savefig(path)
    best = {f"recall@1 after 8 sweeps, {name}": points[-1][1] for name, points in lines["recall"].items()}
    most = {f"captured mass of 1 match, b = 1, {name}": points[0][1] for name, points in lines["kappa"].items()}
    return {"lines": lines, "claims": {**best, **most}}
