"""Tables of docs on models with SCRAM inside."""

from __future__ import annotations

from typing import Any

import table_cells
from table_cells import BY, digits, mebibytes, share, table, time

PHOTOGRAPHS = ("astronaut", "coffee", "chelsea", "camera")


def mobilesam_heads() -> str:
    """docs/mobilesam: each head of the layer whose tensors the other pages use, on several photographs."""
    rows = {name: table_cells.load("mobilesam")[f"{name} layers.2.5"] for name in PHOTOGRAPHS}
    columns = {"default": "default", "four": "four matches", "clusters": "no search"}
    lines = [(name, *(digits(row[key]) for key in columns)) for name, row in rows.items()]
    return table(("photograph", *columns.values()), *lines)


def mobilesam_layers() -> str:
    """docs/mobilesam: the worst head of each layer."""
    rows, lines = table_cells.load("mobilesam"), []
    for name in PHOTOGRAPHS:
        for number in range(6):
            row = rows[f"{name} layers.2.{number}"]
            keys, worst = row["keys"], (max(row[key]) for key in ("default", "four", "clusters"))
            effective = f"{min(keys):.0f}\N{EN DASH}{max(keys):.0f}"
            lines.append(("" if number else name, str(number), effective, *map(share, worst)))
    return table(("photograph", "layer", "keys", "default", "four matches", "no search"), *lines)


def mobilesam_model() -> str:
    """docs/mobilesam: the embedding's error, the least and the mean agreement of masks."""
    rows = table_cells.load("mobilesam")
    shown = {
        "bias": "bias as factors, dense, from the trained model",
        "bias, clusters": "bias as factors, SCRAM in windows, from the trained model",
        "without bias": "bias left out, from the trained model",
        "opened": "all tokens, dense, from the trained model",
        "default": "SCRAM, from dense",
        "four": "SCRAM, four matches",
        "clusters": "SCRAM, no search",
        "tuned": "`scram.tune`, 15 %",
    }
    lines = []
    for key, label in shown.items():
        cells = []
        for row in (rows.get(f"{name} {key}") for name in PHOTOGRAPHS):
            masks = row["mask_agreement"] if row is not None else []
            both = digits([min(masks), sum(masks) / len(masks)]) if masks else ""
            cells.append(f"{digits([row['embedding_error']])}; {both}" if row is not None else "not measured")
        lines.append((label, *cells))
    return table(("", *PHOTOGRAPHS), *lines)


def stretches() -> str:
    """docs/causal: errors and times of clusters under causal order, and of drawn keys."""
    rows = table_cells.load("stretches")
    ways = [name for name in next(iter(rows.values())) if name not in ("positions", "heads", "dense")]
    ways = [name for name in ways if name not in ("date", "commit", "machine")]
    lines = []
    for way in ways:
        cells = []
        for row in rows.values():
            cells.append(f"{share(max(row[way]['error']))}, {row[way]['seconds'] / row['dense']['seconds']:.2f}")
        lines.append((way.replace("1/", "1\N{FRACTION SLASH}"), *cells))
    return table(("stretch, clusters of each, routed keys", *rows), *lines)


def sampler() -> str:
    """docs/sampler: time of a position, dense over a cache and by clusters."""
    stored = table_cells.load("sampler")
    lines = []
    for name, kept in stored.items():
        for size, row in kept.get("rows", {}).items():
            shape = f"{row['batch']} {BY} {row['heads']} {BY} {row['width']}"
            both = time(row["dense_ms"] / 1e3), time(row["scram_ms"] / 1e3)
            lines.append((name.removeprefix("times ").upper(), size, shape, *both))
    whole = f"{stored['mnist']['bits_whole']:.5f}", f"{stored['mnist']['bits_decoded']:.5f}"
    lines.append(("MNIST", "784", "bits a pixel, whole call and pixel by pixel", *whole))
    return table(("on", "positions", "batch, heads, width", "dense", "SCRAM"), *lines)


def diffusion() -> str:
    """docs/diffusion: the layers of the model, and its time with them."""
    head = ("layer", "grid", "attention", "keys visited", "95th percentile", "of dense time")
    lines: list[tuple[str, ...]] = []
    for size, row in table_cells.load("diffusion").items():
        for name, one in row["layers"].items():
            error, low, high = map(share, one["error"])
            grid, keys = BY.join(map(str, one["grid"])), str(one["keys"])
            layer = name.removesuffix(".transformer_blocks.0.attn1").replace(".", " ")
            figures = f"{error} [{low}, {high}]", f"{one['of_dense']:.2f}"
            lines.append((layer, grid, one["attention"], keys, *figures))
        whole = f"{size} latents: {time(row['tuned_seconds'])} in place of {time(row['dense_seconds'])}"
        compiled = f"compiled {time(row['tuned_compiled_seconds'])} in place of {time(row['dense_compiled_seconds'])}"
        ratio = f"{row['tuned_seconds'] / row['dense_seconds']:.2f}"
        lines.append(
            ("**whole model**", size, f"{whole}; {compiled}", "", f"output {share(row['output_error'])} off", ratio)
        )
    return table(head, *lines)


def gmflow_sizes() -> list[dict[str, Any]]:
    """Rows of the sizes, from the smallest."""
    rows = [row for name, row in table_cells.load("gmflow").items() if name.startswith("size ")]
    return sorted(rows, key=lambda row: int(row["grid"][0]))


def gmflow() -> str:
    """docs/gmflow: time and memory of both attentions of GMFlow, three ways."""
    head = ("cells", "pixels", "step", "GMFlow's own", "", "torch SDPA", "SCRAM", "", "times faster than SDPA")
    lines = []
    for row in gmflow_sizes():
        shape, pixels = (BY.join(map(str, row[key])) for key in ("grid", "picture"))
        for step in ("matching", "propagation"):
            one = row[step]
            own = (time(one["own_seconds"]), mebibytes(one["own_bytes"])) if "own_seconds" in one else ("no memory", "")
            dense = "~" * one["sdpa_is_continued"] + time(one["sdpa_seconds"])
            ours = time(one["scram_seconds"]), mebibytes(one["scram_bytes"])
            faster = f"{one['sdpa_seconds'] / one['scram_seconds']:.3g}"
            first = (shape, pixels) if step == "matching" else ("", "")
            lines.append((*first, step, *own, dense, *ours, faster))
    return table(head, *lines)


def gmflow_flow() -> str:
    """docs/gmflow: how far SCRAM's flow is from that of dense attention, and both from the truth, in pixels."""
    head = (
        "cells",
        "matching, from exact",
        "propagation, from exact",
        "flow, from dense",
        "dense, from truth",
        "SCRAM, from truth",
    )
    lines = []
    for row in gmflow_sizes():
        steps = (share(row[step]["pixels_off"]) for step in ("matching", "propagation"))
        if "from_dense" in row:
            flow = tuple(share(row[key]) for key in ("from_dense", "dense_from_truth", "from_truth"))
        else:
            keys = ("coarse_from_dense", "dense_coarse_from_truth", "coarse_from_truth")
            flow = tuple(f"{share(row[key])}, coarse" if key in row else "" for key in keys)
        lines.append((BY.join(map(str, row["grid"])), *steps, *flow))
    return table(head, *lines)


def gmflow_layers() -> str:
    """docs/gmflow: the layers of GMFlow's transformer."""
    head = ("layer", "keys", "windows, error", "clusters, error", "windows", "clusters", "torch SDPA")
    lines = []
    for name, row in table_cells.load("gmflow").items():
        if name.startswith("layer "):
            errors = (share(row[f"{way}_error"]) for way in ("windows", "clusters"))
            times = (time(row[f"{way}_seconds"]) for way in ("windows", "clusters", "sdpa"))
            lines.append((name.removeprefix("layer "), f"{row['keys']:.0f}", *errors, *times))
    return table(head, *lines)


def gmflow_layers_flow() -> str:
    """docs/gmflow: the flow with every layer replaced."""
    rows = {
        name.removeprefix("layers by "): row
        for name, row in table_cells.load("gmflow").items()
        if name.startswith("layers by")
    }
    lines = [(name, share(row["from_dense"]), share(row["from_truth"])) for name, row in rows.items()]
    return table(("layers by", "flow, from dense", "flow, from truth"), *lines)


# --- SAM 2 ---

SAM2_MACHINES = {"cpu": "2 CPU cores, float32, torch SDPA", "cuda": "H200, bfloat16, cuDNN attention"}
SAM2_WAYS = {"dense": "dense", "default": "SCRAM, default", "0.05": "SCRAM, error 5 %", "0.02": "SCRAM, error 2 %"}


def is_photograph(name: str) -> bool:
    """Whether a row of the model's quality has that name."""
    return name not in ("times", "tuned") and not name.startswith("settings-")


def sam2_photograph_rows(device: str, side: int) -> list[dict[str, Any]]:
    keys = {key: key.split() for key in table_cells.load("sam2")}
    mine = [key for key, (x, y, name) in keys.items() if (x, y) == (device, str(side)) and is_photograph(name)]
    return [table_cells.load("sam2")[key] for key in mine]


def sam2_sides(device: str, kind: str) -> list[int]:
    """The sizes that have a row of that kind."""
    rows = table_cells.load("sam2")
    found = {int(key.split()[1]) for key in rows if key.startswith(f"{device} ")}
    return [side for side in sorted(found) if f"{device} {side} {kind}" in rows]


def sam2_quality(photographs: list[dict[str, Any]], way: str) -> tuple[str, str]:
    """The mean error of the embedding, and the mean IoU of all masks and the worst of them."""
    errors = [row[way]["embedding_error"] for row in photographs]
    shares = [value for row in photographs for value in row[way]["iou"]]
    if not shares:
        return "", ""
    return share(sum(errors) / len(errors)), f"{digits([sum(shares) / len(shares)])}, {digits([min(shares)])}"


def sam2_size(device: str, side: int, row: dict[str, Any]) -> tuple[str, ...]:
    photographs = sam2_photograph_rows(device, side)
    points = sum(one["sure"] for one in photographs)
    return f"{side}, {BY.join(map(str, row['tokens']))}", f"{len(photographs)}, {points}" if photographs else ""


SAM2_HEAD = ("pixels, tokens", "photographs, points", "global layers", "dense", "SCRAM", "times faster")
SAM2_QUALITY = ("embedding error", "IoU of masks: mean, worst")


def sam2_tuned(device: str, budgets: tuple[str, ...]) -> list[tuple[str, ...]]:
    """By what `scram.tune` timed."""
    lines = []
    for side in sam2_sides(device, "tuned"):
        row = table_cells.load("sam2")[f"{device} {side} tuned"]
        for number, budget in enumerate(budgets):
            one = row[budget]
            size = ("", "") if number else sam2_size(device, side, row)
            cells = time(one["dense"]), time(one["layers"]), f"{one['dense'] / one['layers']:.3g}"
            lines.append((*size, SAM2_WAYS[budget], *cells, *sam2_quality(sam2_photograph_rows(device, side), budget)))
    return lines


def sam2_timed(device: str, ways: tuple[str, ...]) -> list[tuple[str, ...]]:
    """By the clock, all ways in one run: layers, encoder and memory."""
    lines = []
    for side in sam2_sides(device, "times"):
        row = table_cells.load("sam2")[f"{device} {side} times"]
        dense = min(row["dense"]["layers"])
        for number, way in enumerate(ways):
            size = ("", "") if number else sam2_size(device, side, row)
            layers = min(row[way]["layers"])
            cells = time(dense), time(layers), f"{dense / layers:.3g}"
            lines.append((*size, SAM2_WAYS[way], *cells, *sam2_quality(sam2_photograph_rows(device, side), way)))
    return lines


def sam2_cpu() -> str:
    """docs/sam2: the tuned layers on a CPU."""
    return table((*SAM2_HEAD, *SAM2_QUALITY), *sam2_tuned("cpu", ("0.05", "0.02")))


def sam2_cuda() -> str:
    """docs/sam2: every way on a GPU, with the time and the memory of the whole encoder."""
    lines = sam2_timed("cuda", ("default", "0.05", "0.02"))
    return table((*SAM2_HEAD, *SAM2_QUALITY), *lines) if lines else table_cells.NOT_MEASURED


def sam2_encoder() -> str:
    """docs/sam2: time, peak memory and errors by layer of the whole encoder, where they were measured."""
    lines = []
    for device, machine in SAM2_MACHINES.items():
        for side in sam2_sides(device, "times"):
            row = table_cells.load("sam2")[f"{device} {side} times"]
            for way, label in SAM2_WAYS.items():
                one = row[way]
                errors = " ".join(map(share, one["layer_errors"]))
                lines.append(
                    (machine, str(side), label, time(min(one["encoder"])), mebibytes(one["peak_bytes"]), errors)
                )
    head = ("machine", "pixels", "global layers", "encoder", "peak memory", "error by layer")
    return table(head, *lines) if lines else table_cells.NOT_MEASURED


def sam2_settings() -> str:
    """docs/sam2: the global layers by clusters alone on a GPU, of each photograph and size."""
    lines = []
    for key, row in table_cells.load("sam2").items():
        device, side, name = key.split()
        if device != "cuda" or not name.startswith("settings-"):
            continue
        layers = {int(label.split()[0]) for label in row if label.endswith(" dense")}
        dense = sum(row[f"{layer} dense"]["seconds"] for layer in layers)
        for setting in dict.fromkeys(label.split()[1] for label in row if "+" in label):
            mine = [row[f"{layer} {setting}"] for layer in sorted(layers)]
            seconds = sum(one["seconds"] for one in mine)
            errors = digits(one["p95"][0] for one in mine)
            shown = setting.replace("+", " + ")
            lines.append((side, name.split("-")[1], shown, time(seconds), f"{dense / seconds:.3g}", errors))
    head = ("pixels", "photograph", "clusters + keys", "three layers", "times faster than cuDNN", "errors by layer")
    return table(head, *lines) if lines else table_cells.NOT_MEASURED


def sam2_short() -> str:
    """README: dense attention and an error of 5 %."""
    rows = {"cpu": sam2_tuned("cpu", ("0.05",)), "cuda": sam2_timed("cuda", ("0.05",))}
    lines = [
        (SAM2_MACHINES[device] if not n else "", line[0], *line[3:])
        for device, mine in rows.items()
        for n, line in enumerate(mine)
    ]
    return table(("machine", SAM2_HEAD[0], *SAM2_HEAD[3:], *SAM2_QUALITY), *lines)


def sam2_photographs() -> str:
    """docs/sam2: each photograph, every way."""
    lines = []
    for key, row in table_cells.load("sam2").items():
        device, side, name = key.split()
        if not is_photograph(name):
            continue
        cells = []
        for way in ("default", "0.05", "0.02"):
            shares = row[way]["iou"]
            masks = f"{digits([sum(shares) / len(shares)])} {digits([min(shares)])}" if shares else "no point"
            cells.append(f"{share(row[way]['embedding_error'])}; {masks}")
        lines.append((device, side, name, f"{row['sure']} of {row['points']}", *cells))
    ways = list(SAM2_WAYS.values())[1:]
    return table(("device", "pixels", "photograph", "points", *ways), *lines)
