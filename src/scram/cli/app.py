"""The `scram` command: what can be typed. A command imports its own file, and with it torch, only when it runs."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option
from typer.core import TyperCommand, TyperGroup

from .. import __version__
from . import arguments
from .arguments import (
    ALL_PARTS,
    BENCH_PATCH,
    BENCH_SIZES,
    DISTRIBUTED_SIZES,
    FIGURES,
    MODES,
    PARTS,
    PHOTOGRAPHS,
    TRAINED,
)
from .console import one_line_errors, output_folder


class PlainFlags:
    """The help shows a flag without the type of a value, for it takes none."""

    def get_params(self, ctx: Any) -> list[Any]:
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for one in parameters:
            if getattr(one, "is_flag", False):
                one.metavar = ""
        return parameters


class Command(PlainFlags, TyperCommand):
    """One command."""


class Group(PlainFlags, TyperGroup):
    """All commands. Whatever goes wrong, in usage or in a command, is one line."""

    def invoke(self, ctx: Any) -> Any:
        with one_line_errors(ctx.params["traceback"]):
            return super().invoke(ctx)

    def main(self, *arguments: Any, **settings: Any) -> Any:
        if not settings.get("standalone_mode", True):
            return super().main(*arguments, **settings)
        try:
            code = super().main(*arguments, **{**settings, "standalone_mode": False})
        except Exception as error:
            if not hasattr(error, "format_message"):  # of the parser's errors alone
                raise
            if type(error).__name__ == "NoArgsIsHelpError":
                error.show()  # type: ignore[attr-defined]  # no command at all: the help
                sys.exit(2)
            where = getattr(getattr(error, "ctx", None), "command_path", "scram")
            message = " ".join(error.format_message().split())
            typer.echo(f"scram: {message} (`{where} --help` shows the options)", err=True)
            sys.exit(2)
        sys.exit(code if isinstance(code, int) else 0)


def _examples(*lines: str) -> str:
    return "Examples:\n\n" + "\n\n".join(f"  scram {line}" for line in lines)


app = typer.Typer(
    cls=Group,
    help="Attention over grids at O(N log N) cost: try it, measure it, and see what runs on this machine.",
    epilog=_examples(
        "demo",
        "match left.png right.png",
        "denoise camera --add-noise 25",
        "inpaint photo.jpg --mask mask.png",
        "explore left.png right.png",
        "bench",
        "info",
    )
    + "\n\nWords that the tables use: docs/glossary.md.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
Out = Annotated[Path, Option(help="Folder for pictures and numbers; made if it is not there.")]
Json = Annotated[bool, Option("--json", help="Print the numbers as JSON, not as a table.")]
Seed = Annotated[int, Option(help="Seed of everything random: search, sampled queries, shuffles.")]
Device = Annotated[str, Option(help="cpu or cuda.")]
Impl = Annotated[str, Option(help="Which implementation runs; `scram info` lists them.")]
Image = Annotated[str, Argument(help=f"A picture file, or one of scikit-image's: {', '.join(PHOTOGRAPHS)}.")]
PatchSide = Annotated[int | None, Option(min=3, help="Side of the patches, odd.")]
Iterations = Annotated[int | None, Option(min=1, max=100, help="Steps at each level.")]
SearchSeed = Annotated[int, Option(min=0, help="Seed of the searches.")]
Radius = Annotated[int, Option(min=0, max=64, help="Radius of the windows around matches (b).")]


def _command(*examples: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return app.command(cls=Command, epilog=_examples(*examples))


def _given(**values: int | None) -> dict[str, int]:
    """What is not None."""
    return {name: value for name, value in values.items() if value is not None}


@_command("demo", "demo --size 144 --out /tmp/demo --json")
def demo(
    out: Out = Path("scram-demo"),
    size: Annotated[int, Option(min=16, help="Height of the photographs in pixels.")] = 288,
    seed: Seed = 0,
    impl: Impl = "auto",
    as_json: Json = False,
) -> None:
    """Rebuild photograph A from the pixels of photograph B, and measure it against exact attention."""
    with output_folder(out):
        from .demo import run

        run(out, size, seed, arguments.one_of("impl", impl, arguments.IMPLS)).finish(out / "demo.json", as_json)


@_command(
    "match left.png right.png",
    "match --sample motorcycle",
    "match a.jpg b.jpg --size 240 --out /tmp/m --json",
    "match a.jpg small.jpg --scales 0.5,1,2",
    "match a.jpg turned.jpg --rotations 0,90,180,270",
    "match a.jpg b.jpg --points 2000 --colmap",
)
def match(
    a: Annotated[Path | None, Argument(help="Photograph A; its pixels are the queries.", show_default=False)] = None,
    b: Annotated[Path | None, Argument(help="Photograph B; its pixels are the keys.", show_default=False)] = None,
    sample: Annotated[str | None, Option(help="Instead of files: city, or scikit-image's motorcycle.")] = None,
    truth: Annotated[Path | None, Option(help="A .npy of true disparities [H, W] or flow [H, W, 2].")] = None,
    out: Out = Path("scram-match"),
    size: Annotated[int | None, Option(min=16, help="Resize both to this height in pixels.")] = None,
    patch: Annotated[int, Option(min=1, help="Side of the patches, odd.")] = arguments.MATCH_PATCH,
    width: Annotated[int, Option(min=1, help="Width of the features kept by the PCA.")] = arguments.MATCH_WIDTH,
    matches: Annotated[int, Option(min=1, max=64, help="Matches per pixel (kappa).")] = 1,
    separation: Annotated[int, Option(min=0, help="Distance between matches of a pixel (L).")] = 0,
    radius: Radius = arguments.MATCH_RADIUS,
    sweeps: Annotated[int, Option(min=0, max=1000, help="Sweeps of the search at the coarsest level (T).")] = 8,
    scale: Annotated[float, Option(help="Factor on the cosine before the softmax.")] = arguments.MATCH_SCALE,
    scales: Annotated[str, Option(help="Sizes of things in B against A, with commas: 0.5,1,2.")] = "1",
    rotations: Annotated[str, Option(help="Degrees B is turned, counter-clockwise, with commas: 0,90.")] = "0",
    points: Annotated[int, Option(min=1, max=1_000_000, help="Matches to sample, by certainty, spread out.")] = 5000,
    colmap: Annotated[bool, Option("--colmap", help="Also write the samples as text files for COLMAP.")] = False,
    device: Device = "cpu",
    seed: Seed = 0,
    impl: Impl = "auto",
    as_json: Json = False,
) -> None:
    """Find every pixel of A in B: a color-coded match field, B warped onto A, lines, a certainty, numbers."""
    with output_folder(out):
        arguments.check_device(device)
        arguments.check_positive("scale", scale)
        sizes = arguments.numbers("scales", scales, 0.1, 10)
        angles = arguments.numbers("rotations", rotations, -360, 360)
        arguments.check_pair(a, b, sample, truth, size)
        if colmap:
            arguments.check_colmap(a, b)
        from ..images.matching import Settings
        from .match import run

        named = arguments.one_of("impl", impl, arguments.IMPLS)
        settings = Settings(
            patch=patch,
            width=width,
            matches=matches,
            separation=separation,
            radius=radius,
            sweeps=sweeps,
            scale=scale,
            seed=seed,
            scales=sizes,
            rotations=angles,
            impl=named,
        )
        report = run(
            a,
            b,
            sample,
            truth,
            out,
            size=size,
            settings=settings,
            device=device,
            points=points,
            colmap=colmap,
        )
        report.finish(out / "match.json", as_json)


@_command(
    "denoise photo.jpg",
    "denoise camera --add-noise 25",
    "denoise photo.png --sigma 15 --out /tmp/d --json",
    "denoise film.mp4",
    "denoise folder_of_frames --reach 3",
)
def denoise(
    image: Annotated[str, Argument(help=f"A picture, film, folder of frames, or {', '.join(PHOTOGRAPHS)}.")],
    out: Out = Path("scram-denoise"),
    sigma: Annotated[float | None, Option(min=0.1, max=255, help="Noise level of 255; else it is estimated.")] = None,
    add_noise: Annotated[float | None, Option(min=0.1, max=255, help="First add noise; shows PSNR.")] = None,
    rivals: Annotated[bool, Option(help="With --add-noise, also run scikit-image and OpenCV.")] = True,
    fast: Annotated[bool, Option("--fast", help="Non-local means, in one pass.")] = False,
    patch: Annotated[int | None, Option(min=1, help="--fast: side of patches, odd; gray 7, color 5.")] = None,
    strength: Annotated[float | None, Option(help="--fast: bandwidth of weights in units of noise.")] = None,
    matches: Annotated[int | None, Option(min=1, max=64, help="--fast, pictures: windows per pixel; 2.")] = None,
    radius: Annotated[int | None, Option(min=0, max=64, help="--fast: of the windows; 5, films 3.")] = None,
    reach: Annotated[int, Option(min=0, max=16, help="Of a film: frames on either side that are used.")] = 2,
    device: Device = "cpu",
    seed: Annotated[int, Option(min=0, help="Seed of the search and of added noise.")] = 0,
    as_json: Json = False,
) -> None:
    """Remove noise from a picture or a film; with --add-noise, measure it."""
    with output_folder(out):
        arguments.check_device(device)
        if strength is not None:
            arguments.check_positive("strength", strength)
        if patch is not None and patch % 2 == 0:
            raise ValueError(f"patch must be odd, got {patch}")
        changed = {"patch": patch, "strength": strength, "radius": radius}
        if arguments.is_film(image):
            from .denoise_film import run as run_film

            changed |= {"reach": reach, "seed": seed}
            film = run_film(
                Path(image), out, sigma=sigma, add_noise=add_noise, fast=fast, changed=changed, device=device
            )
            film.finish(out / "denoise.json", as_json)
            return
        is_sample = arguments.is_photograph(image)
        from .denoise import run

        changed["matches"] = matches
        report = run(
            image,
            is_sample,
            out,
            sigma=sigma,
            add_noise=add_noise,
            rivals=rivals,
            fast=fast,
            changed=changed,
            seed=seed,
            device=device,
        )
        report.finish(out / "denoise.json", as_json)


@_command(
    "inpaint photo.jpg --mask mask.png", "inpaint photo.png --rectangle 120,80,64,48", "inpaint cutout.png --json"
)
def inpaint(
    image: Image,
    mask: Annotated[Path | None, Option(help="A picture of equal size: white (or transparent) = hole.")] = None,
    rectangle: Annotated[list[str] | None, Option(help="A hole: left,top,width,height; repeatable.")] = None,
    out: Out = Path("scram-inpaint"),
    sharp: Annotated[bool, Option("--sharp", help="Copy single patches, as in grass: crisper, errs more.")] = False,
    patch: PatchSide = None,
    matches: Annotated[int | None, Option(min=1, max=64, help="Patches that each becomes a mean of.")] = None,
    iterations: Iterations = None,
    device: Device = "cpu",
    seed: SearchSeed = 0,
    as_json: Json = False,
) -> None:
    """Fill holes of a picture with patches from elsewhere in it; without a mask, what is transparent."""
    with output_folder(out):
        arguments.check_device(device)
        arguments.is_photograph(image)
        if mask is not None:
            arguments.check_readable(mask)
        rectangles = [arguments.rectangle(text) for text in rectangle or ()]
        from .inpaint import run

        changed = _given(patch=patch, matches=matches, iterations=iterations, seed=seed)
        run(image, mask, rectangles, out, sharp, changed, device).finish(out / "inpaint.json", as_json)


@_command(
    "generate grass --count 3", "generate texture.png --size 512x512", "generate tissue.jpg --variety 0.2 --seed 7"
)
def generate(
    image: Image,
    size: Annotated[str | None, Option(help="Of the new pictures, WxH; else as the picture.")] = None,
    count: Annotated[int, Option(min=1, max=1000, help="How many, with seeds that follow.")] = 1,
    variety: Annotated[float, Option(min=0, help="0 gives back the picture; much loses its layout.")] = 0.3,
    scenes: Annotated[bool, Option("--scenes", help="Take what is no texture too: a collage.")] = False,
    out: Out = Path("scram-generate"),
    patch: PatchSide = None,
    iterations: Iterations = None,
    device: Device = "cpu",
    seed: Annotated[int, Option(min=0, help="Seed of the first picture.")] = 0,
    as_json: Json = False,
) -> None:
    """Make new pictures of a texture (grass, stones, tissue) out of its patches; scenes are refused."""
    with output_folder(out):
        arguments.check_device(device)
        arguments.is_photograph(image)
        width, height = (None, None) if size is None else arguments.picture_size(size)
        from .generate import run

        changed = _given(patch=patch, iterations=iterations, seed=seed)
        run(image, width, height, count, variety, out, changed, device, scenes=scenes).finish(
            out / "generate.json", as_json
        )


@_command("retarget photo.jpg --size 400x", "retarget photo.jpg --size 640x360 --out /tmp/r --json")
def retarget(
    image: Image,
    size: Annotated[str, Option(help="Of the result: WxH, or Wx or xH to keep the other side.")],
    out: Out = Path("scram-retarget"),
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Make a picture narrower or wider, lower or higher; what stands out keeps its shape where there is room."""
    with output_folder(out):
        arguments.check_device(device)
        arguments.is_photograph(image)
        width, height = arguments.picture_size(size)
        from .retarget import run

        run(image, width, height, out, device).finish(out / "retarget.json", as_json)


@_command("figures", "figures --only maps,modes --out /tmp/f", "figures --size 288 --json")
def figures(
    out: Out = Path("scram-figures"),
    only: Annotated[str, Option(help=f"Which, with commas: {', '.join(FIGURES)}.")] = ",".join(FIGURES),
    size: Annotated[int, Option(min=32, help="Height of the photographs in pixels.")] = 144,
    data: Annotated[Path | None, Option(help=f"Folder with {' and '.join(TRAINED)} for curves.")] = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Draw the paper's figures: attention maps, separated modes, sweeps of the search, recall and mass."""
    with output_folder(out):
        names = arguments.some_of("only must name", only, FIGURES)
        if data is not None and "curves" in names:
            for name in TRAINED:
                arguments.check_readable(data / name)
        from .figures import run

        run(out, names, size, data, seed).finish(out / "figures.json", as_json)


@_command(
    "bench",
    "bench --sizes 32,64 --widths 3 --out /tmp/b",
    "bench --device cuda --longest 12",
    "bench --resume",
    "bench --distributed --ranks 1,2,4 --sizes 256",
)
def bench(
    out: Out = Path("scram-bench"),
    device: Device = "cpu",
    sizes: Annotated[str | None, Option(help="Sides of the pictures, with commas; 32 to 512, GPU 64 to 2048.")] = None,
    widths: Annotated[
        str | None, Option(help="Widths of queries and keys, with commas; the paper's 3, and 64.")
    ] = None,
    parts: Annotated[str, Option(help=f"What to measure, with commas, of {', '.join(ALL_PARTS)}.")] = ",".join(PARTS),
    longest: Annotated[float, Option(min=0.0, help="Leave out calls that would take longer, in seconds.")] = 3.0,
    budget: Annotated[float | None, Option(min=0.0, help="Seconds for all; CPU 140, GPU without limit.")] = None,
    resume: Annotated[bool, Option("--resume", help="Keep the times in bench.json and measure the rest.")] = False,
    draw_only: Annotated[bool, Option("--draw-only", help="Measure nothing; table and plot of bench.json.")] = False,
    distributed: Annotated[bool, Option("--distributed", help="Measure scram.distributed: processes, shards.")] = False,
    ranks: Annotated[str, Option(help="With --distributed: how many processes, with commas.")] = "1,2,4",
    modes: Annotated[str, Option(help=f"With --distributed: some of {', '.join(MODES)}.")] = ",".join(MODES),
    heads: Annotated[int, Option(min=1, max=8, help="With --distributed: heads.")] = 4,
    as_json: Json = False,
) -> None:
    """Measure SCRAM, dense attention, fixed sparse patterns, brute force and nearest-neighbor libraries."""
    with output_folder(out):
        arguments.check_device(device)
        usual = DISTRIBUTED_SIZES if distributed else BENCH_SIZES[device]
        sides = usual if sizes is None else arguments.whole_numbers("sizes", sizes, 16)
        kinds = arguments.some_of("parts must be", parts, ALL_PARTS)
        widths = widths or ("64" if distributed else "3,64")
        numbers = arguments.whole_numbers("widths", widths, 1, 3 * BENCH_PATCH**2)  # the colors of a patch
        if distributed:
            if resume or draw_only:
                raise ValueError("--resume and --draw-only are not for --distributed")
            several = arguments.whole_numbers("ranks", ranks, 1, 64)
            named = arguments.some_of("modes must be", modes, MODES)
            from .distributed import run as run_distributed

            run_distributed(out, device, sides, numbers, several, tuple(named), heads, as_json)
            return
        from .bench import run

        run(
            out,
            device,
            sizes=sides,
            widths=numbers,
            parts=tuple(kinds),
            longest=longest,
            budget=budget,
            resume=resume,
            draw_only=draw_only,
            as_json=as_json,
        )


@_command("coherence", "coherence --size 64 --out /tmp/c --json")
def coherence(
    out: Out = Path("scram-coherence"),
    size: Annotated[int, Option(min=16, help="Side of the square grids; a multiple of 16 is best.")] = 64,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Recall and error against the degree of spatial coherence, from shuffled keys to smooth fields."""
    with output_folder(out):
        from .coherence import run

        run(out, size, seed).finish(out / "coherence.json", as_json)


@_command(
    "judge qkv.npz",
    "judge qkv.npz --backend sdpa --backend scram --backend mypackage.module:function",
    "judge qkv.safetensors --grid 64x64",
    "judge qk.npz --axes yxe --names q,k,k --scale 0.1",
)
def judge(
    file: Annotated[Path, Argument(help="An .npz or .safetensors file with queries, keys and values.")],
    backend: Annotated[
        list[str] | None, Option(help="What to judge, once or more often; frontier: many.", show_default=False)
    ] = None,
    names: Annotated[str, Option(help="Queries, keys and values in the file, with commas.")] = "q,k,v",
    axes: Annotated[str | None, Option(help="Stored axes: b, h, e, n for all points, others: grid.")] = None,
    grid: Annotated[
        str | None, Option(help="Extents of the grid, such as 64x96; must have as many points as stored.")
    ] = None,
    scale: Annotated[float | None, Option(help="Factor on the scores; 1 / sqrt(width) if none is stored.")] = None,
    layout: Annotated[str, Option(help="What module:function takes: grid [B, H, *G, E], sdpa [B, H, N, E].")] = "grid",
    causal: Annotated[bool, Option("--causal", help="Compare with causal attention.")] = False,
    dtype: Annotated[str | None, Option(help="Run in this dtype; else as stored, on a CPU at least float32.")] = None,
    queries: Annotated[int, Option(min=1, help="Queries whose error is measured, in each head.")] = 512,
    longest: Annotated[float, Option(min=0.0, help="Give a backend up after so many seconds.")] = 240.0,
    out: Out = Path("scram-judge"),
    device: Device = "cpu",
    seed: Annotated[int, Option(min=0, help="Seed of the sampled queries and of what a backend draws.")] = 0,
    as_json: Json = False,
) -> None:
    """Measure the error and the speed of any attention function on your tensors, beside dense attention."""
    with output_folder(out):
        arguments.check_tensors(file)
        arguments.check_device(device)
        taken = arguments.one_of("layout", layout, arguments.LAYOUTS)
        if dtype is not None:
            arguments.one_of("dtype", dtype, arguments.DTYPES)
        if scale is not None:
            arguments.check_positive("scale", scale)
        chosen = arguments.check_backends(backend or arguments.JUDGED)
        three = arguments.three_names(names)
        extents = None if grid is None else arguments.extents(grid)
        from .judge import run
        from .tensors import Layout

        tensor_layout = Layout(axes, extents, scale)
        run(
            file,
            chosen,
            names=three,
            tensor_layout=tensor_layout,
            layout=taken,
            causal=causal,
            dtype=dtype,
            device=device,
            num_queries=queries,
            seed=seed,
            longest=longest,
            out=out,
            as_json=as_json,
        )


@_command(
    "explore a.jpg b.jpg",
    "explore photo.jpg",
    "explore --sample city",
    "explore qkv.npz",
    "explore qkv.safetensors --grid 64x64 --out /tmp/e --json",
)
def explore(
    a: Annotated[str, Argument(help="Picture A (queries), or .npz or .safetensors tensors.", show_default=False)] = "",
    b: Annotated[str | None, Argument(help="Picture B (keys); else A attends to itself.", show_default=False)] = None,
    sample: Annotated[str | None, Option(help="Instead of files: city, or scikit-image's motorcycle.")] = None,
    names: Annotated[str, Option(help="Of tensors: queries, keys and values, with commas.")] = "q,k,v",
    axes: Annotated[str | None, Option(help="Of tensors: b, h, e, n for all points, others: grid.")] = None,
    grid: Annotated[str | None, Option(help="Of tensors: extents of the grid, as many points as stored.")] = None,
    scale: Annotated[float | None, Option(help="Factor on the scores; 100 of pictures, else as stored.")] = None,
    out: Out = Path("scram-explore"),
    size: Annotated[int | None, Option(min=16, max=4096, help="Height of the pictures; else 65536 pixels.")] = None,
    patch: Annotated[int, Option(min=1, help="Side of the patches, odd.")] = arguments.MATCH_PATCH,
    width: Annotated[int, Option(min=1, help="Width of the features kept by the PCA.")] = arguments.MATCH_WIDTH,
    matches: Annotated[int, Option(min=0, max=64, help="Matches per query (kappa); 0: no search.")] = 4,
    separation: Annotated[int, Option(min=0, help="Distance between matches of a query (L).")] = 2,
    radius: Radius = 1,
    sweeps: Annotated[int, Option(min=0, max=64, help="Sweeps of the search (T).")] = 5,
    clusters: Annotated[int, Option(min=0, max=4096, help="Clusters for the other keys; 0 for none.")] = 256,
    keys: Annotated[int, Option(min=0, help="Keys that a tile of queries attends one by one.")] = 512,
    panes: Annotated[str, Option(help="auto, one (queries and keys in one picture), or two.")] = "auto",
    megabytes: Annotated[float, Option(min=0.2, max=500, help="Size that the page may have.")] = 12.0,
    device: Device = "cpu",
    seed: SearchSeed = 0,
    impl: Impl = "auto",
    as_json: Json = False,
) -> None:
    """Look at attention, whole: one HTML page on which every query shows where it attends."""
    with output_folder(out):
        arguments.check_device(device)
        arguments.check_explored(a, b, sample, panes, scale, patch)
        if not matches and not clusters:
            raise ValueError("without matches and clusters nothing is attended; give --matches or --clusters")
        arguments.check_of_tensors(sample or a, axes, grid, size)
        three = arguments.three_names(names)
        extents = None if grid is None else arguments.extents(grid)
        from .explore import Settings, run

        settings = Settings(
            patch=patch,
            width=width,
            matches=matches,
            separation=separation,
            sweeps=sweeps,
            radius=radius,
            clusters=clusters,
            keys=keys,
            scale=scale,
            panes=panes,
            size=size,
            megabytes=megabytes,
            seed=seed,
            device=device,
            impl=impl,
        )
        run(a, b, sample, three, axes, extents, out, settings).finish(out / "explore.json", as_json)


@_command("info", "info --json")
def info(as_json: Json = False) -> None:
    """Say what SCRAM finds on this machine, and why an implementation cannot run."""
    from .info import run

    run(as_json)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"scram {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, Option("--version", help="Print the version.", callback=_version, is_eager=True)] = False,
    traceback: Annotated[bool, Option("--traceback", help="Show where an error came from.")] = False,
) -> None:
    pass  # `Group.invoke` reads the options
