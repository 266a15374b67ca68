"""Tables of docs/distributed."""

from __future__ import annotations

from typing import Any

import table_cells
from table_cells import BY, mebibytes, share, table, time


def distributed() -> str:
    """docs/distributed: time, memory and bytes of a process against the number of processes, forward and backward."""
    head = (
        "mode",
        "picture",
        "processes",
        "forward",
        "forward + backward",
        "sent",
        "held, forward + backward",
        "error",
    )
    rows = table_cells.load("distributed")["rows"]
    lines = []
    for row in sorted(rows.values(), key=lambda row: (row["contender"], row["size"], row["ranks"])):
        if not row["backward"]:
            both = rows[f"{row['contender']} {row['size']} E{row['width']} h{row['heads']} P{row['ranks']} backward"]
            first = row["contender"], f"{row['size']}{BY}{row['size']}", str(row["ranks"])
            held = f"{both['peak_bytes'] / 1e6:.0f} MB"
            figures = time(row["seconds"]), time(both["seconds"]), f"{both['sent'] / 1e6:.0f} MB", held
            lines.append((*first, *figures, share(row["output_error"])))
    return table(head, *lines)


def distributed_predictions(heads: int) -> str:
    """docs/distributed: on H200s, as the cost model says."""
    head = ("points", "GPUs", "pass", "ring", "gather", *(["heads"] if heads > 1 else []))
    rows, lines = table_cells.load("distributed_model")[f"heads {heads}"]["rows"], []
    for name, modes in rows.items():
        points, gpus = f"10^{name[3:5].lstrip('0')}", name.split()[-2]
        for which, shown in (("forward", "forward"), ("both", "and backward")):
            cells = [prediction(modes.get(mode, {}).get(which)) for mode in head[3:]]
            lines.append((points, gpus, shown, *cells))
            points = gpus = ""
    return table(head, *lines)


def prediction(one: dict[str, Any] | None) -> str:
    if one is None:
        return "ranks do not divide heads"
    sent, held = (f"{one[key]:.0f} GB" if one[key] > 3 else f"{one[key]:.1f} GB" for key in ("sent", "held"))
    if one["bottleneck"] == "memory":
        return f"does not fit: {held}"
    return f"**{time(one['seconds'])}**, {one['bottleneck']}; sends {sent}, holds {held}"


def distributed_simulation() -> str:
    """docs/distributed: calls over slow links, and what the model says of them."""
    keys = {"keys": "keys travel", "visit": "a visit took", "seconds": "the call took", "model": "the model says"}
    lines = [
        (name.split(", keys")[0], *(f"{row[key]:.3f} s" for key in keys))
        for name, row in table_cells.load("distributed_simulation").items()
    ]
    return table(("case", *keys.values()), *lines)


def distributed_quality(figure: str) -> str:
    """One process beside 2 and 4 ranks: all rows / those near a border of a shard."""
    rows = [row for name, row in table_cells.load("distributed_quality").items() if figure in row]
    found = {(row["set"], row["way"], row["ranks"]): row for row in rows}
    ways = [way for way in dict.fromkeys(row["way"] for row in rows) if way != "one process"]
    head = [f"{way}, {ranks} ranks" for ranks in (2, 4) for way in ("one process", *ways)]
    lines = []
    for name in dict.fromkeys(row["set"] for row in rows):
        each = [found[name, way, ranks] for ranks in (2, 4) for way in ("one process", *ways)]
        digits = 4 if figure == "error" else 3
        shown = (
            " / ".join(f"{row[x]:.{digits}f}".removeprefix("0") for x in (figure, f"{figure}_border")) for row in each
        )
        lines.append((name.replace("0.125", "1/8").replace("unn", "un-n"), *shown))
    return table(("set, scale" if figure == "error" else "set", *head), *lines)


def distributed_memory() -> str:
    rows = [row for row in table_cells.load("distributed_quality").values() if row["set"] == "memory"]
    lines = []
    for ranks in dict.fromkeys(row["ranks"] for row in rows):
        each = sorted((row for row in rows if row["ranks"] == ranks), key=lambda row: row["backward"])
        held = (f"{row['mebibytes']:.1f} MiB" for row in each)
        lines.append((str(ranks), mebibytes(each[0]["inputs"]), *held))
    return table(("ranks", "q, k and v of a rank", "forward", "forward and backward"), *lines)


def nccl_one_rank() -> str:
    """docs/distributed: what a mesh of one rank costs."""
    rows = table_cells.load("nccl_one_rank")["rows"]
    names = {"plain": "`scram.attention`", "heads": "`scram.distributed.attention`, mode `heads`"}
    names |= {"dtensor batch": "DTensors, Shard(0)", "dtensor heads": "DTensors, Shard(1)"}
    names |= {"dtensor whole": "DTensors, Replicate()"}
    cells = [
        (shown, *(f"{row['ms'][name]:.2f} ms, {row['ratio'][name]:.2f}" for row in rows.values()))
        for name, shown in names.items()
    ]
    return table(("call", *(f"{name}, times the plain call" for name in rows)), *cells)
