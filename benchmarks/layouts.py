"""What stands on grids in the models that the tests run, and what does not and why: the table of docs/your_model.

python benchmarks/layouts.py run      # small random configs, on a CPU; half a minute
python benchmarks/layouts.py table
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from typing import Any

import table_cells
import torch
from store import Store

import scram

sys.path.append(str(table_cells.ROOT / "tests"))  # where the models are made


@torch.no_grad()
def measured(model: torch.nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """Layouts of the layers, the share of queries on grids, and how far windows over the whole grid are from dense."""
    model.eval()
    want = model(**inputs)[0]
    how = {"search": scram.Search(sweeps=0, seed=0), "radius": 99, "tail": None, "impl": "reference"}
    with scram.patch_sdpa(grid="auto", **how) as report:
        out = model(**inputs)[0]
    with scram.patch_sdpa(grid="auto", error=0.05) as named:
        model(**inputs)
    on_grid = sum(call.q[-2] * times for call, times in report.calls.items() if not call.why_not)
    queries = sum(call.q[-2] * times for call, times in report.calls.items())
    layers = list(named.layers.values())
    return {
        "layouts": list(dict.fromkeys(str(one.tokens).split(" = ")[0] for one in layers if one.grid)),
        "key_grids": list(dict.fromkeys(str(one.tokens.key_grid) for one in layers if one.tokens.key_grid)),
        "layers": [sum(bool(one.grid) for one in layers), len(layers)],
        "share": on_grid / queries,
        "off": float((out - want).abs().max() / want.abs().max()),
        "left": list(dict.fromkeys(one.why_not.split(";")[0].split(",")[0] for one in layers if not one.grid)),
    }


def run() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    from support.families import BY_BACK_END, FAMILIES
    from support.vision import PATCH_ONLY, VISION

    store = Store("layouts")
    for library, models in (("diffusers", FAMILIES), ("transformers", VISION)):
        for name, made in models.items():
            torch.manual_seed(0)
            by_name = name in BY_BACK_END if library == "diffusers" else name not in PATCH_ONLY
            row = measured(*made[0]())
            store.put(f"{library} {name}", library=library, name=name, by_name=by_name, **row)
            print(name, row)


def table() -> str:
    """docs/your_model: layouts of the models that the tests run."""
    head = ("library", "model", "grids", "layers on grids", "their share of queries", "by", "left to torch")
    lines = []
    for row in table_cells.load("layouts").values():
        ways = {"diffusers": "back end or patch", "transformers": "name or patch"}
        grids = "; ".join(row["layouts"]).replace(" x ", table_cells.BY)
        keys = f" (keys {'; '.join(row['key_grids'])})" if row["key_grids"] else ""
        way = ways[row["library"]] if row["by_name"] else "patch"
        on_grids, layers = row["layers"]
        share = table_cells.share(row["share"])
        cells = (grids + keys, f"{on_grids} of {layers}", share, way if on_grids else "", "; ".join(row["left"]))
        lines.append((row["library"], row["name"], *cells))
    return table_cells.table(head, *lines) if lines else table_cells.NOT_MEASURED


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "table"))
    if parser.parse_args().what == "run":
        run()
    else:
        print(table())


if __name__ == "__main__":
    main()
