"""A diffusion model of diffusers at a large latent grid, its attention tuned for an error budget.

    python examples/diffusion.py --small      # 96 x 96 latents, two minutes
    python examples/diffusion.py              # 128 x 128 latents, some minutes on two cores; writes the stored results

The model is diffusers' `UNet2DConditionModel`, the denoiser of Stable Diffusion, from a small config with random
weights: nothing is downloaded, and no line of its code is changed. Its self-attention layers see every latent point.
First a survey says what SCRAM would do to each layer. Then the layers are tuned in one eager call, the tuned model is
compiled without a graph break, and both are compared with the model as it is.

Random weights attend nearly evenly, which trained layers do less: the budget is what carries over, not the figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import scram
from scram.cli.provenance import made_with
from scram.integrations.layers import Layer

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "diffusion.json"
CHANNELS, TEXT, TOKENS = 4, 32, 77  # of the latents; width and number of the prompt's tokens
Inputs = tuple[Tensor, Tensor, Tensor]


def unet(latents: int, width: int = 64) -> nn.Module:
    """The denoiser, with self- and cross-attention at the full and at half the resolution; random weights."""
    try:
        import diffusers
    except ImportError:
        sys.exit("this example needs diffusers: pip install diffusers")
    torch.manual_seed(0)
    make: Any = diffusers.UNet2DConditionModel
    model: nn.Module = make(
        sample_size=latents,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        layers_per_block=1,
        norm_num_groups=8,
        block_out_channels=(width, 2 * width),
        cross_attention_dim=TEXT,
        attention_head_dim=2,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )
    return model.eval().requires_grad_(False)


def inputs(latents: int) -> Inputs:
    """Smooth latents with some noise, a time, and a prompt."""
    generator = torch.Generator().manual_seed(1)
    coarse = torch.randn(1, CHANNELS, latents // 8, latents // 8, generator=generator)
    smooth = nn.functional.interpolate(coarse, scale_factor=8, mode="bicubic")
    noise = torch.randn(1, CHANNELS, latents, latents, generator=generator)
    return smooth + 0.3 * noise, torch.tensor([300]), torch.randn(1, TOKENS, TEXT, generator=generator)


def timed(call: Callable[[], Tensor], repeats: int = 3) -> tuple[Tensor, float]:
    """The output, and the median seconds of a call; one comes first untimed."""
    out, times = call(), []
    for _ in range(repeats):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return out, statistics.median(times)


def run(model: nn.Module, given: Inputs, error: float, backend: str) -> dict[str, Any]:
    """Dense, tuned, and tuned and compiled: seconds, and how far off the output is."""
    dense, dense_seconds = timed(lambda: model(*given).sample)
    with scram.patch_sdpa(grid="auto", error=error) as report:
        begun = time.perf_counter()
        model(*given)
        first = time.perf_counter() - begun
        tuned, tuned_seconds = timed(lambda: model(*given).sample)
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        same, compiled_seconds = timed(lambda: compiled(*given).sample)
    plain = torch.compile(model, fullgraph=True, backend=backend)
    _, plain_seconds = timed(lambda: plain(*given).sample)
    print(report)
    return {
        "error": error,
        "first_seconds": first,
        "dense_seconds": dense_seconds,
        "tuned_seconds": tuned_seconds,
        "dense_compiled_seconds": plain_seconds,
        "tuned_compiled_seconds": compiled_seconds,
        "output_error": float((tuned - dense).norm() / dense.norm()),
        "compiled_difference": float((same - tuned).norm() / dense.norm()),
        "layers": {name: figures(layer) for name, layer in report.layers.items() if layer.plan is not None},
        "left_alone": sorted({call.why_not for call in report.calls if call.why_not}),
    }


def figures(layer: Layer) -> dict[str, Any]:
    """What was tuned of a layer, for the stored results."""
    assert layer.plan is not None
    rung = layer.plan.rungs[layer.plan.chosen]
    return {
        "grid": list(layer.grid),
        "attention": str(rung.setting),
        "keys": rung.keys,
        "error": rung.error,
        "of_dense": 1 / layer.plan.speedup,
        "calls": layer.calls,
    }


def shown(row: dict[str, Any]) -> str:
    ratio = row["dense_seconds"] / row["tuned_seconds"]
    compiled = row["dense_compiled_seconds"] / row["tuned_compiled_seconds"]
    return (
        f"a step of the model: {row['dense_seconds']:.3g} s dense, {row['tuned_seconds']:.3g} s tuned "
        f"({ratio:.2f} times as fast), the first call {row['first_seconds']:.3g} s\n"
        f"compiled: {row['dense_compiled_seconds']:.3g} s dense, {row['tuned_compiled_seconds']:.3g} s tuned "
        f"({compiled:.2f} times as fast)\n"
        f"output {100 * row['output_error']:.2f} % off; compiled and eager differ by {row['compiled_difference']:.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="96 x 96 latents; nothing is stored")
    parser.add_argument("--error", type=float, default=0.05, help="budget of each layer")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    given = parser.parse_args()
    latents = 96 if given.small else 128
    model, tensors = unet(latents), inputs(latents)
    print(f"UNet2DConditionModel at {latents} x {latents} latents. What SCRAM would do to its layers:")
    print(scram.survey(model, tensors, error=given.error))
    print("\nPatched, tuned, compiled:")
    row = run(model, tensors, given.error, given.backend)
    print(shown(row))
    if not given.small:
        RESULTS.write_text(json.dumps({f"{latents}x{latents}": {**row, **made_with("cpu")}}, indent=1) + "\n")


if __name__ == "__main__":
    main()
