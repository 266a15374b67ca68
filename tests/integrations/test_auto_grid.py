"""Which layers have a grid with grid="auto": those whose queries come from a picture, and no others."""

import pytest
import torch
import torch.fx
import torch.nn.functional as F
from torch import nn

import scram
from scram.integrations.auto_grid import AutoGrids, ModuleCall, module_calls
from scram.integrations.layers import Tokens


class Config(dict):
    """As diffusers has it; `__getattr__` as transformers has it."""

    def __getattr__(self, name):
        return self.get(name)


class Seen(nn.Module):
    """Says which modules call."""

    def __init__(self):
        super().__init__()
        self.found = []

    def helper(self):
        self.found = module_calls()

    def forward(self, x, memory=None):
        x = x + 1
        self.helper()
        return x


def declaring(*tensors, **config):
    """The call of a module with a config."""
    module = nn.Identity()
    module.config = Config(config)
    return ModuleCall(module, tensors)


def found(total, *calls, causal=False):
    return AutoGrids().find(torch.empty(1, 2, total, 8), total, causal, calls)


def test_the_innermost_module_comes_first_with_its_arguments():
    inner, x = Seen(), torch.zeros(1)
    outer = nn.Sequential(nn.Identity(), nn.Sequential(inner))
    outer(x)
    assert [call.module for call in inner.found] == [inner, outer[1], outer]
    assert all(call.tensors[0] is x for call in inner.found)  # what it was given, not what it made of it
    assert module_calls() == []
    inner(x, memory=torch.ones(2))
    assert (inner.found[0].memory == 1).all()
    assert len(inner.found[0].tensors) == 2


@pytest.mark.parametrize(
    ("total", "size", "config", "grid"),
    [
        (197, None, {"image_size": 224, "patch_size": 16}, ((14, 14), 1)),
        (33, None, {"image_size": (32, 64), "patch_size": (8, 8)}, ((4, 8), 1)),
        (36, None, {"image_size": (32, 64), "patch_size": 8}, ((4, 8), 4)),
        (32, None, {"sample_size": [8, 16], "patch_size": 2}, ((4, 8), 0)),
        (33, (3, 64, 32), {"image_size": 32, "patch_size": 8}, ((8, 4), 1)),  # another size than declared
        (50, (3, 224, 224), {"image_size": 224, "patch_size": 16}, None),  # a quarter of the patches, 7 x 7
        (64, None, {"sample_size": 10, "patch_size": 4}, None),  # no whole number of patches
        (64, None, {"sample_size": 64, "patch_size": None}, None),
        (256, None, {"image_size": (32, 64), "patch_size": 8}, None),
        (64, (16, 8, 8), {}, ((8, 8), 0)),
        (33, (16, 4, 8), {}, ((4, 8), 1)),
        (64, (8, 8, 16), {}, ((8, 8), 0)),  # [B, height, width, C]
        (32, (3, 32, 64), {}, ((4, 8), 0)),  # patches of 8, which divides out
        (32, (16, 32, 64), {}, None),  # not a picture for certain
        (96, (3, 32, 192), {"image_size": 32, "patch_size": 8}, ((4, 24), 0)),  # 3 x 32 points are as many
        (97, (3, 32, 192), {"image_size": 32, "patch_size": 8}, ((4, 24), 1)),
        (1024, (16, 64, 64), {"sample_size": 8, "patch_size": 2, "in_channels": 16}, ((32, 32), 0)),
        (384, (16, 24, 16), {}, ((24, 16), 0)),  # channels come first
        (100, None, {}, None),
        (4096, None, {}, None),
    ],
)
def test_grids_are_found(total, size, config, grid):
    pictures = () if size is None else (torch.empty(2, *size),)
    answer = found(total, ModuleCall(nn.Identity()), declaring(*pictures, **config))
    if grid is None:
        assert answer.startswith(f"{total} tokens, and no picture is known")
        assert "pass grid=(height, width)" in answer
    else:
        assert answer == Tokens(*grid)


@pytest.mark.parametrize(
    ("conv", "total", "grid"),
    [
        (nn.Conv2d(3, 8, 14, 14), 5 * 10 + 5, ((5, 10), 5)),  # patches and registers
        (nn.Conv2d(3, 8, 16, 16), 5 * 10, None),
        (nn.Conv2d(3, 8, 7, 2, 3), 3 * 5, ((3, 5), 0)),  # a backbone of stride 32
        (nn.Conv2d(3, 8, 7, 2, 3), 13, None),
        (nn.Conv2d(3, 8, (2, 23), (2, 23)), 3 * 70, ((35, 6), 0)),  # as many as 3 x 70 points
    ],
)
def test_convolutions_say_how_a_picture_is_cut(conv, total, grid):
    answer = found(total, ModuleCall(nn.Sequential(conv), (torch.empty(1, 3, 70, 140),)))
    assert answer == Tokens(*grid) if grid else "no picture is known" in answer


def test_queries_as_an_argument_are_no_picture():
    """[B, H, N, E] of 64 features would be 8 x 8 patches of a picture of two channels."""
    q = torch.empty(1, 2, 1024, 64)
    answer = AutoGrids().find(q, 1024, False, [ModuleCall(nn.Identity(), (q, q, q))])
    assert answer.startswith("1024 tokens, and no picture")


def test_text_and_causal_layers_are_no_pictures():
    picture = ModuleCall(nn.Identity(), (torch.empty(1, 3, 16, 16),))
    assert found(256, picture) == Tokens((16, 16))
    assert found(256, picture, causal=True).startswith("causal order")
    layer = nn.Identity()
    layer.is_causal = True
    assert found(256, ModuleCall(layer), picture).startswith("causal order")
    ids = ModuleCall(nn.Identity(), (torch.zeros(1, 256, dtype=torch.int64),))
    assert found(256, ids, picture).startswith("tokens of text")


def text(number):
    return torch.empty(1, number, 8)


# Tokens; how the model was called; what is found.
PLACED = {
    "latents of a film": (72, {"film": (4, 3, 8, 12), "patch_size": (1, 2, 2), "in_channels": 4}, Tokens((3, 4, 6))),
    "frames before channels": (36, {"film": (4, 3, 8, 12), "patch_size": 2, "num_channels": 3}, None),
    "tubes of frames": (
        *(48, {"film": (4, 3, 8, 12), "patch_size": 2, "tubelet_size": 2, "num_channels": 3}),
        Tokens((2, 4, 6)),
    ),
    "one frame": (24, {"film": (4, 1, 8, 12), "patch_size": 2, "in_channels": 4}, Tokens((4, 6))),
    "points of a film": (288, {"film": (4, 3, 8, 12)}, Tokens((3, 8, 12))),
    "points of each frame": (96, {"film": (4, 3, 8, 12)}, Tokens((8, 12))),
    "text before": (
        79,
        {"film": (4, 3, 8, 12), "patch_size": 2, "in_channels": 4, "text": 7, "kind": "before"},
        "text",
    ),
    "text after latents": (
        31,
        {"picture": (4, 8, 12), "patch_size": 2, "text": 7, "kind": "SD3Transformer2DModel"},
        "text",
    ),
    "text somewhere": (31, {"picture": (4, 8, 12), "patch_size": 2, "text": 7, "kind": "Model"}, "7 tokens of text"),
    "told": (144, {"places": {"num_frames": 3, "height": 6, "width": 8}}, Tokens((3, 6, 8))),
    "told of one frame": (48, {"places": {"height": 6, "width": 8}}, Tokens((6, 8))),
    "told of another": (49, {"places": {"height": 6, "width": 8}}, None),
    "ids": (24, {"places": {"img_ids": torch.cartesian_prod(*map(torch.arange, (1, 4, 6)))}}, Tokens((4, 6))),
    "ids in another order": (
        24,
        {"places": {"img_ids": torch.cartesian_prod(*map(torch.arange, (4, 6))).flip(1)}},
        None,
    ),
    "shapes": (24, {"places": {"img_shapes": [[(1, 4, 6)]]}}, Tokens((4, 6))),
    "shapes of two pictures": (24, {"places": {"img_shapes": [[(1, 4, 6), (1, 2, 2)]]}}, None),
}


@pytest.mark.parametrize("name", PLACED)
def test_a_model_says_where_its_tokens_are(name):
    total, how, expected = PLACED[name]
    how = dict(how)
    kind = {"before": "CogVideoXTransformer3DModel"}.get(how.get("kind"), how.pop("kind", "Model"))
    module = type(kind, (nn.Module,), {})()
    tensors = [torch.empty(1, *how.pop(one)) for one in ("film", "picture") if one in how]
    memory = text(how.pop("text")) if "text" in how else None
    places = how.pop("places", {})
    module.config = Config(how)
    answer = found(total, ModuleCall(nn.Identity()), ModuleCall(module, tuple(tensors), memory, places))
    if expected == "text":
        grid, off = ((3, 4, 6), {"before": 7}) if tensors[0].ndim == 5 else ((4, 6), {"after": 7})
        assert answer == Tokens(grid, **off)
    elif isinstance(expected, str):
        assert answer == "7 tokens of text beside a grid; pass grid=(4, 6) and before=7 or after=7"
    else:
        assert answer == expected if expected else "no picture is known" in answer


def test_reduced_keys_of_a_layer_that_was_told_its_size():
    layer = nn.Sequential(nn.Linear(8, 8), nn.Conv2d(8, 8, 4, 4))
    calls = [ModuleCall(layer, (), None, {"height": 8, "width": 12})]
    grids = AutoGrids()
    assert grids.find(torch.empty(1, 1, 96, 8), 6, False, calls) == Tokens((8, 12), key_grid=(2, 3))
    for keys, others in (
        (7, calls),
        (6, [ModuleCall(layer)]),
        (6, [ModuleCall(nn.Identity(), (), None, calls[0].places)]),
    ):
        answer = grids.find(torch.empty(1, 1, 96, 8), keys, False, others)
        assert answer == f"96 queries and {keys} keys, which are not the same grid (cross-attention)"


def test_layers_of_a_graph_are_not_seen():
    graph = torch.fx.symbolic_trace(nn.Identity())
    picture = ModuleCall(nn.Identity(), (torch.empty(1, 3, 16, 16),))
    assert found(256, ModuleCall(graph), picture).startswith("a call in a graph of torch.fx")


class Detr(nn.Module):
    """A backbone, an encoder of its feature map, a decoder of object queries, of torch's own layers."""

    def __init__(self, queries):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 16, 3, 2, 1))
        self.encoder = nn.TransformerEncoderLayer(16, 2, 16, 0.0, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(16, 2, 16, 0.0, batch_first=True)
        self.queries = nn.Parameter(torch.randn(1, queries, 16))

    def forward(self, x):
        memory = self.encoder(self.backbone(x).flatten(2).mT)
        return self.decoder(self.queries.expand(len(x), -1, -1), memory)


@pytest.mark.parametrize("queries", [100, 25, 36, 64])
def test_object_queries_are_no_picture(queries):
    """Not even as many as the feature map has points, or as another feature map would have."""
    model, x = Detr(queries).eval(), torch.randn(1, 3, 40, 40)
    with scram.patch_sdpa(grid="auto", error=0.1) as report:
        model(x)
    assert {name: layer.grid for name, layer in report.layers.items()} == {
        "encoder.self_attn": (10, 10),
        "decoder.self_attn": (),
        "decoder.multihead_attn": (),
    }
    why = report.layers["decoder.self_attn"].why_not
    assert "object queries" in why if queries in (100, 25) else "no picture is known" in why
    assert "pass grid=(height, width)" in why
    assert report.left_alone == 2


@pytest.mark.slow
def test_compiled_object_queries_are_no_picture():
    model, x = Detr(100).eval(), torch.randn(1, 3, 40, 40)
    for first in (True, False):
        torch._dynamo.reset()
        with scram.patch_sdpa(grid="auto") as report:
            if not first:
                model(x)
            before = report.left_alone, report.dense
            torch.compile(model, backend="aot_eager")(x)
        assert (report.left_alone - before[0], report.dense - before[1]) == ((3, 0) if first else (2, 1))
        assert not first or "compiled before its grid was seen" in str(report)


class Language(nn.Module):
    """A causal language model of 4096 tokens."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)

    def forward(self, ids, picture=None):
        x = self.embed(ids).unsqueeze(1)
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def test_a_language_model_is_left_to_torch():
    ids = torch.zeros(1, 4096, dtype=torch.int64)
    with scram.patch_sdpa(grid="auto") as report:
        Language()(ids, torch.zeros(1, 3, 64, 64))
    assert report.left_alone == 1
    assert "left to torch: causal order, as of text; pass grid=" in str(report)
