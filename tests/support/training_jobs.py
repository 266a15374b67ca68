"""What ranks are asked of a small vision transformer: to train it, and to save and load what it keeps."""

import os
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

import scram
from scram.core.tails.clusters import TENSORS, settings_of
from scram.distributed import KeptMatches

ENGINE = "reference"


class Block(nn.Module):
    def __init__(self, width, **how):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = scram.nn.GridAttention(width, 2, impl=ENGINE, **how)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class VisionTransformer(nn.Module):
    """Pictures [B, 3, 20, 20] -> classes [B, 4]; 5 x 5 tokens."""

    def __init__(self, width=8, **how):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.blocks = nn.ModuleList(Block(width, **how) for _ in range(2))
        self.classes = nn.Linear(width, 4)

    def forward(self, pictures):
        x = self.patches(pictures).movedim(1, -1)
        for block in self.blocks:
            x = block(x)
        return self.classes(x.mean((1, 2)))


def transformer(**how):
    """In float64, the same on every rank; it searches."""
    torch.manual_seed(3)
    settings = {
        "search": scram.Search(sweeps=1, jumps=(1,), gossip=1, seed=0),
        "tail": scram.Clusters(count=4, keys=6, seed=0),
        **how,
    }
    return VisionTransformer(**settings).double()


def batch(size):
    """Pictures of stripes, whose direction is the class."""
    make = torch.Generator().manual_seed(1)
    classes = torch.arange(size) % 4
    angle = classes * torch.pi / 4
    rows, columns = torch.meshgrid(torch.arange(20.0), torch.arange(20.0), indexing="ij")
    along = angle.cos().view(-1, 1, 1, 1) * rows + angle.sin().view(-1, 1, 1, 1) * columns
    noise = torch.randn(size, 3, 20, 20, generator=make)
    return ((along * 1.3).sin() + 0.2 * noise).double(), classes


def wrapped(model, mesh, way):
    if way == "ddp":
        return DistributedDataParallel(model)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def trained(model, shards, steps):
    """Losses of some steps; gradients are the mean over the shards that this process has."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for pictures, classes in shards:
            loss = nn.functional.cross_entropy(model(pictures), classes) / len(shards)
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses


def parameters(model):
    """Whole ones, by name."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    whole = {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in inner.state_dict().items()}
    return {name: x.detach().clone() for name, x in whole.items()}


def cut_batch(size, ranks):
    pictures, classes = batch(size)
    return list(zip(pictures.chunk(ranks), classes.chunk(ranks), strict=True))


def trains(mesh, way, steps=5, whole=False):
    """The mean loss of all ranks at each step, after comparing the parameters with those of one process.

    One process has the shards one after the other. With `whole` it has the whole batch at once: the answer is the same
    where it does not depend on noise, which counts the rows of a batch.
    """
    how = {"radius": 5, "tail": None} if whole else {}
    shards = cut_batch(8, mesh.size())
    model = wrapped(transformer(**how), mesh, way)
    losses = torch.tensor(trained(model, [shards[mesh.get_local_rank()]], steps))
    torch.distributed.all_reduce(losses)
    alone = transformer(**how)
    begun = parameters(alone)
    wanted = trained(alone, [batch(8)] if whole else shards, steps)
    torch.testing.assert_close(losses / mesh.size(), torch.tensor(wanted), atol=1e-6, rtol=0)
    found, want = parameters(model), parameters(alone)
    assert found.keys() == want.keys()
    for name, x in want.items():
        torch.testing.assert_close(found[name], x, atol=1e-9, rtol=0, msg=lambda words, name=name: f"{name}: {words}")
    moved = max((want[name] - x).abs().max().item() for name, x in begun.items())
    assert moved > 1e-3  # what is compared has been trained
    return (losses / mesh.size()).tolist()


def kept(model):
    """Matches and clusters of every layer; None where one keeps nothing."""
    layers = [one for one in model.modules() if isinstance(one, scram.nn.GridAttention)]
    return [None if one.matches is None else (one.matches, one.codebook) for one in layers]


def same(found, want):
    """Whether layers keep the same, bit for bit."""
    for one, (matches, book) in zip(found, want, strict=True):
        assert torch.equal(one[0].index, matches.index)
        assert torch.equal(one[0].score, matches.score)
        assert one[0].key_grid == matches.key_grid
        assert (book is None) == (one[1] is None)
        if book is not None:
            same_book(one[1], book)


def same_book(found, want):
    """Whether clusters are the same, bit for bit; the order of their keys is made when it is needed."""
    assert settings_of(found) == settings_of(want)
    for name in TENSORS:
        a, b = getattr(found, name), getattr(want, name)
        assert torch.equal(a, b) if b is not None else a is None, name


def rows_of(kept_by_ranks, begin, end):
    """Rows of what all ranks kept, joined."""
    joined = []
    for layer in zip(*kept_by_ranks, strict=True):
        matches, books = zip(*[one for one in layer if one is not None], strict=True)
        index, score = (torch.cat([getattr(x, name) for x in matches])[begin:end] for name in ("index", "score"))
        book = books[0]
        if book is not None:
            names = [name for name in TENSORS if getattr(book, name) is not None]
            cut = {n: torch.cat([getattr(x, n) for x in books])[begin:end] for n in names}
            book = scram.Codebook(**cut, **settings_of(book))
        joined.append((scram.Matches(index, score, matches[0].key_grid), book))
    return joined


def save(mesh, folder, way, rows, plans, tail="clusters"):
    """Each rank evaluates its rows of a batch and keeps what it finds; all save. What this rank kept."""
    how = {"keep_matches": True} | ({} if tail == "clusters" else {"tail": None})
    model = wrapped(transformer(**how), mesh, way).eval()
    begin = sum(rows[: mesh.get_local_rank()])
    mine = batch(sum(rows))[0][begin : begin + rows[mesh.get_local_rank()]]
    with torch.no_grad():
        if way == "fsdp" or len(mine):
            model(mine if len(mine) else batch(1)[0])
    if not len(mine):
        for layer in model.modules():
            if isinstance(layer, scram.nn.GridAttention):
                layer.reset()
    state = {"model": get_model_state_dict(model), "kept": KeptMatches(model, mesh=mesh), "plans": plans}
    dcp.save(state, checkpoint_id=folder)
    return kept(model)


def load(mesh, folder, way, kept_by_ranks, plans, total, tail="clusters"):
    """A model that starts otherwise has parameters, plans and its rows of what was kept; and starts from them."""
    how = {"keep_matches": True} | ({} if tail == "clusters" else {"tail": None})
    model = transformer(**how)
    with torch.no_grad():
        for x in model.parameters():
            x.add_(1.0)
    model = wrapped(model, mesh, way).eval()
    weights, loaded = get_model_state_dict(model), scram.Plans(old=next(iter(plans.values())))
    state = {"model": weights, "kept": KeptMatches(model, mesh=mesh, saved=folder), "plans": loaded}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, weights)
    for name, x in parameters(model).items():
        assert torch.equal(x, parameters(transformer(**how))[name]), name
    assert loaded == plans
    share = -(-total // mesh.size())
    begin, end = share * mesh.get_local_rank(), min(share * (mesh.get_local_rank() + 1), total)
    if begin >= end:
        assert kept(model) == [None, None]
        return None
    want = rows_of(kept_by_ranks, begin, end)
    same(kept(model), want)
    again = KeptMatches(model, mesh=mesh).state_dict()  # now of this rank's own
    assert all(f"/{mesh.get_local_rank()}/" in name for name in again if not name.endswith("version"))
    if way == "ddp" and begin < end:
        return starts_from(model.module, batch(total)[0][begin:end], want, how)
    return None


def starts_from(model, pictures, want, how):
    """The next call is that of a model which has kept the same."""
    other = transformer(**how).eval()
    for layer, (matches, book) in zip([block.attention for block in other.blocks], want, strict=True):
        layer.kept_index, layer.kept_score, layer.kept_grid = matches.index, matches.score, matches.key_grid
        layer.codebook = book
    cold = transformer(**how).eval()
    with torch.no_grad():
        assert torch.equal(model(pictures), other(pictures))
        cold(pictures)
    return not torch.equal(model.blocks[0].attention.matches.index, cold.blocks[0].attention.matches.index)


def refused(mesh, folder):
    """What KeptMatches and Plans say where they do not fit."""
    model, words = transformer(keep_matches=True), []
    linear = nn.Sequential(nn.Linear(2, 2))
    dcp.save({"weights": linear.state_dict()}, checkpoint_id=os.path.join(folder, "without"))
    dcp.save({"kept": KeptMatches(model, mesh=mesh)}, checkpoint_id=os.path.join(folder, "cold"))
    model.eval()(batch(1)[0])
    dcp.save({"kept": KeptMatches(model, mesh=mesh)}, checkpoint_id=os.path.join(folder, "warm"))
    for one, how in (
        (model, {"saved": os.path.join(folder, "without")}),
        (linear, {"saved": os.path.join(folder, "warm")}),
        (model, {}),
    ):
        try:
            KeptMatches(one, mesh=mesh, **how).load_state_dict({})
        except ValueError as error:
            words.append(str(error))
    state = KeptMatches(model, mesh=mesh, saved=os.path.join(folder, "cold"))
    dcp.load({"kept": state}, checkpoint_id=os.path.join(folder, "cold"))
    assert kept(model) == [None, None]  # nothing was kept when it was saved
    return words


def unlike(mesh, folder):
    """Ranks that evaluated grids of different sizes: a warning, and a start without."""
    model = transformer(keep_matches=True).eval()
    side = 20 if mesh.get_local_rank() else 16
    with torch.no_grad():
        model(batch(1)[0][:, :, :side, :side])
    dcp.save({"kept": KeptMatches(model, mesh=mesh)}, checkpoint_id=folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        alone = KeptMatches(model, saved=folder)  # one rank's share is the whole batch
        dcp.load({"kept": alone}, checkpoint_id=folder)
    assert kept(model) == [None, None]
    return [str(x.message) for x in caught]


def reads_under_fsdp(mesh):
    """`read` is no forward pass: FSDP2 has to be told of it."""
    layer, whole = (transformer().blocks[0].attention for _ in range(2))
    fully_shard(layer, mesh=mesh)
    register_fsdp_forward_method(layer, "read")
    x, tokens = torch.ones(1, 4, 4, 8).cumsum(1).double(), torch.ones(1, 2, 8).cumsum(2).double()
    with torch.no_grad():
        torch.testing.assert_close(layer.read(tokens, x), whole.read(tokens, x), atol=1e-12, rtol=0)
