"""Files of values: written whole or not at all; loaders give a valid value or a ValueError, whatever a file holds."""

import json
import os
import random
import stat
import struct
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

import scram
from scram.quality.plan import Rung, Setting

BOOK = scram.Codebook(
    centers=torch.randn(1, 2, 3, 4),
    values=torch.randn(1, 2, 3, 5),
    sizes=torch.full((1, 2, 3), 2, dtype=torch.int32),
    label=torch.tensor([0, 0, 1, 1, 2, 2], dtype=torch.int32).repeat(1, 2, 1).reshape(1, 2, 2, 3),
    variance=torch.rand(1, 2, 4),
    spreads=torch.rand(1, 2, 3),
    score="dot",
    scale=0.5,
    slope=torch.randn(1, 2, 4, 5),
    key_mask=torch.ones(1, 2, 3, dtype=torch.bool),
    keys=4,
    second_order=False,
)
MATCHES = scram.Matches.identity((2, 3), heads=2)
RUNGS = (
    Rung(
        Setting(scram.Search(matches=2, reach=(2, 1), seed=0), scram.Clusters(count=32), (0, 2)),
        30,
        0.01,
        (0.05, 0.04, float("inf")),
        0.2,
        True,
    ),
    Rung(Setting(), 256, 0.02, (0.0, 0.0, 0.0), 0.0, True),
)
PLAN = scram.Plan(
    error=0.1,
    rungs=RUNGS,
    chosen=0,
    causal=False,
    scale=0.3,
    score="dot",
    impl="auto",
    num_queries=100,
    queries=256,
    seed=0,
    confidence=0.99,
    tensors="nothing",
    given=("key_mask",),
    split=0.25,
)
VALUES = {"Codebook": BOOK, "Matches": MATCHES, "Plan": PLAN, "Plans": scram.Plans({"a": PLAN, "b": PLAN})}


def saved(value, path):
    value.save(path)
    return path.read_bytes()


@pytest.mark.parametrize("name", VALUES)
def test_a_failed_write_leaves_the_old_file(tmp_path, name):
    """The system refuses to write more than some bytes, as a full disk does."""
    resource = pytest.importorskip("resource")
    before = saved(VALUES[name], tmp_path / "value")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(Exception, match="File too large"):
            VALUES[name].save(tmp_path / "value")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "value").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["value"]


@pytest.mark.parametrize("name", VALUES)
def test_a_value_may_be_saved_where_it_was_loaded_from(tmp_path, name):
    """Loaded tensors may be views of the file."""
    kind = type(VALUES[name])
    VALUES[name].save(tmp_path / "value")
    kind.load(tmp_path / "value").save(tmp_path / "value")
    again = kind.load(tmp_path / "value")
    for part in ("label", "variance", "spreads", "slope", "key_mask", "index"):
        if hasattr(again, part):
            assert torch.equal(getattr(again, part), getattr(VALUES[name], part))
    if name in ("Plan", "Plans"):
        assert again == VALUES[name]


@pytest.mark.skipif(os.name == "nt", reason="modes and links of files are others there")
@pytest.mark.parametrize("name", VALUES)
def test_modes_and_links_of_files_stay(tmp_path, name):
    (tmp_path / "link").symlink_to(tmp_path / "value")
    umask = os.umask(0o027)
    try:
        VALUES[name].save(tmp_path / "link")
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "value").stat().st_mode) == 0o640
    (tmp_path / "value").chmod(0o600)
    VALUES[name].save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert stat.S_IMODE((tmp_path / "value").stat().st_mode) == 0o600
    with pytest.raises(FileNotFoundError, match="none/value"):
        VALUES[name].save(tmp_path / "none" / "value")


@pytest.mark.skipif(not os.path.isdir("/dev/fd"), reason="no such folder")
def test_what_is_no_regular_file_is_written_to():
    reader, writer = os.pipe()
    PLAN.save(f"/dev/fd/{writer}")
    os.close(writer)
    with open(reader, encoding="utf-8") as file:
        assert json.load(file) == PLAN.as_dict()


def uses(value, path):
    """What a loaded value must stand."""
    assert repr(value)
    value.save(path)
    if isinstance(value, scram.Codebook):
        assert int(value.label.min()) >= -1
        assert int(value.label.max()) < value.sizes.shape[-1]
    if isinstance(value, scram.Matches):
        value.coords()


def loads_or_refuses(kind, content, folder):
    """Whether the content of a file is a value; another error than ValueError is one of the test."""
    (folder / "value").write_bytes(content)
    try:
        value = getattr(scram, kind).load(folder / "value")
    except ValueError as error:
        if not str(error).startswith(str(folder / "value")):
            raise
        return False
    uses(value, folder / "again")
    return True


@pytest.mark.parametrize("kind", VALUES)
def test_flipped_and_cut_files_load_or_are_refused(tmp_path, kind):
    whole, draw = saved(VALUES[kind], tmp_path / "value"), random.Random(0)
    found = []
    for _ in range(150):
        content = bytearray(whole)
        for _ in range(draw.choice([1, 1, 2, 8])):
            at = draw.randrange(len(content))
            content[at] = draw.choice([content[at] ^ (1 << draw.randrange(8)), draw.randrange(256), *b'0-[]{}",e'])
        if draw.random() < 0.2:
            del content[draw.randrange(len(content)) :]
        found.append(loads_or_refuses(kind, bytes(content), tmp_path))
    assert not all(found)
    assert any(found) or kind in ("Plan", "Plans")
    assert loads_or_refuses(kind, whole, tmp_path)


ODD = [
    None,
    True,
    -1,
    0,
    3,
    2**31,
    2**63,
    10**400,
    0.5,
    -0.5,
    "x",
    "",
    "inf",
    "nan",
    float("inf"),
    float("nan"),
    [],
    {},
    [[]],
    [1],
    [1, 1],
    [-1, 1],
    [0.1, 0.2],
    [0.2, 0.1],
    [float("nan")] * 3,
    ["x"] * 3,
    {"kind": "Search"},
    {"x": {}},
]


def places_in(data):
    """The keys that lead to every value of nested dicts and lists."""
    for name, value in data.items() if isinstance(data, dict) else enumerate(data):
        yield (name,)
        if isinstance(value, (dict, list)):
            yield from ((name, *rest) for rest in places_in(value))


def with_value(data, place, value):
    changed = json.loads(json.dumps(data))
    inner = changed
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    return changed


def test_plans_with_odd_fields_load_or_are_refused(tmp_path):
    data = PLAN.as_dict()
    for place in places_in(data):
        for value in ODD:
            content = json.dumps(with_value(data, place, value)).encode()
            loads_or_refuses("Plan", content, tmp_path)
        without = with_value(data, place, None)
        inner = without
        for name in place[:-1]:
            inner = inner[name]
        del inner[place[-1]]
        loads_or_refuses("Plan", json.dumps(without).encode(), tmp_path)


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("Plan", DEEP),
        ("Plans", DEEP),
        ("Plan", json.dumps(with_value(PLAN.as_dict(), ("tensors",), 0)).replace(": 0,", f": {DEEP},")),
        ("Plans", json.dumps({"format": "scram.Plans", "version": 1, "layers": 0}).replace(": 0", f": {DEEP}")),
    ],
    ids=["Plan", "Plans", "field", "layers"],
)
def test_deep_json_is_refused(tmp_path, kind, content):
    assert not loads_or_refuses(kind, content.encode(), tmp_path)
    with pytest.raises(ValueError, match=r"state_dict must be what Plans\.state_dict returned"):
        scram.Plans().load_state_dict({"json": content})


def settings(**changes):
    return {"score": "dot", "scale": 0.5, "keys": 4, "second_order": False} | changes


def test_codebooks_with_odd_settings_load_or_are_refused(tmp_path):
    tensors = {name: getattr(BOOK, name) for name in scram.core.tails.clusters.TENSORS}
    texts = ["", "{", "3", "[]", DEEP, json.dumps(settings(more=1)), json.dumps({"score": "dot"})]
    texts += [json.dumps(settings(radius=None)), json.dumps(settings(report=None))]  # of codebooks before routes
    texts += [json.dumps(with_value(settings(), place, x)) for place in places_in(settings()) for x in ODD]
    taken = 0
    for text in texts:
        save_file(tensors, tmp_path / "file", metadata={"format": "scram.Codebook", "settings": text})
        taken += loads_or_refuses("Codebook", (tmp_path / "file").read_bytes(), tmp_path)
    assert 0 < taken < len(texts) / 4


WRONG_TENSORS = {
    "variance": [
        torch.ones(1, 2, 3),
        torch.ones(1, 2, 3, 4),
        torch.ones(1, 2, 4).double(),
        torch.ones(1, 2, 4, dtype=torch.int32),
        -torch.ones(1, 2, 4),
        torch.full((1, 2, 4), torch.nan),
        torch.full((1, 2, 4), torch.inf),
    ],
    "spreads": [
        torch.ones(1, 2, 2),
        torch.ones(1, 2),
        torch.ones(1, 2, 3).double(),
        -torch.ones(1, 2, 3),
        torch.full((1, 2, 3), torch.nan),
        torch.full((1, 2, 3), torch.inf),
    ],
    "slope": [
        torch.ones(1, 2, 4, 4),
        torch.ones(1, 2, 5, 4),
        torch.ones(1, 2, 4),
        torch.ones(1, 2, 4, 5).double(),
        torch.full((1, 2, 4, 5), torch.nan),
        torch.full((1, 2, 4, 5), -torch.inf),
    ],
    "gains": [torch.ones(1, 2, 3)],
    "order": [torch.arange(6, dtype=torch.int32).repeat(1, 2, 1)],
    "centers": [
        torch.ones(1, 2, 3, 4).half(),
        torch.ones(1, 2, 3, 4).double(),
        torch.ones(1, 1, 3, 4),
        torch.full((1, 2, 3, 4), torch.nan),
    ],
    "values": [torch.ones(1, 2, 4, 5), torch.ones(1, 2, 3), torch.full((1, 2, 3, 5), torch.inf)],
    "sizes": [
        torch.ones(1, 2, 3),
        -torch.ones(1, 2, 3, dtype=torch.int32),
        torch.ones(1, 2, 4, dtype=torch.int32),
        torch.full((1, 2, 3), 10**9, dtype=torch.int32),
    ],
    "label": [
        torch.full((1, 2, 2, 3), 3, dtype=torch.int32),
        torch.full((1, 2, 2, 3), -2, dtype=torch.int32),
        torch.zeros(1, 2, dtype=torch.int32),
        torch.zeros(1, 2, 2, 3),
    ],
    "key_mask": [
        torch.ones(1, 2, 3),
        torch.ones(1, 3, 2, dtype=torch.bool),
        torch.ones(1, 3, 2, 3, dtype=torch.bool),
        torch.full((1, 2, 3), 7, dtype=torch.uint8).view(torch.bool),
    ],
    "more": [torch.ones(1)],
    "score": [torch.ones(1)],
}


@pytest.mark.parametrize("name", WRONG_TENSORS)
def test_codebooks_with_odd_tensors_are_refused(tmp_path, name):
    tensors = {name: getattr(BOOK, name) for name in scram.core.tails.clusters.TENSORS}
    metadata = {"format": "scram.Codebook", "settings": json.dumps(settings())}
    for x in WRONG_TENSORS[name]:
        save_file(tensors | {name: x}, tmp_path / "file", metadata=metadata)
        assert not loads_or_refuses("Codebook", (tmp_path / "file").read_bytes(), tmp_path), (name, x)
    if name in scram.core.tails.clusters.NEEDED:
        save_file({n: x for n, x in tensors.items() if n != name}, tmp_path / "file", metadata=metadata)
        assert not loads_or_refuses("Codebook", (tmp_path / "file").read_bytes(), tmp_path)


@pytest.mark.parametrize("grid", ["", "x", "0", "2", "-2,3", "2,3,1", "2.0,3", "65536,65536", "9" * 5000 + ",1"])
def test_matches_with_odd_grids_are_refused(tmp_path, grid):
    tensors = {"index": MATCHES.index, "score": MATCHES.score}
    save_file(tensors, tmp_path / "file", metadata={"format": "scram.Matches", "key_grid": grid})
    assert not loads_or_refuses("Matches", (tmp_path / "file").read_bytes(), tmp_path)


@pytest.mark.parametrize("change", [{"index": 6}, {"index": -5}, {"index": 10**9}, {"score": torch.nan}], ids=str)
def test_matches_with_odd_numbers_are_refused(tmp_path, change):
    tensors = {"index": MATCHES.index, "score": MATCHES.score}
    tensors |= {name: torch.full_like(tensors[name], x) for name, x in change.items()}
    save_file(tensors, tmp_path / "file", metadata={"format": "scram.Matches", "key_grid": "2,3"})
    assert not loads_or_refuses("Matches", (tmp_path / "file").read_bytes(), tmp_path)


@pytest.mark.parametrize("kind", ["Codebook", "Matches"])
def test_odd_headers_are_refused(tmp_path, kind):
    whole = saved(VALUES[kind], tmp_path / "value")
    length = struct.unpack("<Q", whole[:8])[0]
    header, data = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    headers = [DEEP, "{}", json.dumps({"__metadata__": {"format": 3}}), json.dumps(header | {"__metadata__": None})]
    headers += [json.dumps(with_value(header, place, x)) for place in places_in(header) for x in ODD[:12]]
    headers += [
        json.dumps(with_value(header, (name, "dtype"), dtype))
        for name in header
        if name != "__metadata__"
        for dtype in ("F4", "F8_E4M3", "F8_E8M0", "BF16", "U64", "C64", "BOOL", "F64")
    ]
    for text in headers:
        for padded in (text, text + " " * (-len(text) % 8)):
            loads_or_refuses(kind, struct.pack("<Q", len(padded)) + padded.encode() + data, tmp_path)
    for size in (0, 1, length + 1, 2**32, 2**63, 2**64 - 1):
        assert not loads_or_refuses(kind, struct.pack("<Q", size) + whole[8:], tmp_path)


def test_other_devices_are_reached_after_the_checks(tmp_path):
    BOOK.save(tmp_path / "book")
    assert scram.Codebook.load(tmp_path / "book", device="meta").centers.is_meta
    MATCHES.save(tmp_path / "matches")
    assert scram.Matches.load(tmp_path / "matches", device="meta").index.is_meta
    replace(BOOK, key_mask=None, slope=None, keys=0).save(tmp_path / "book")
    plain = scram.Codebook.load(tmp_path / "book")
    assert (plain.key_mask, plain.slope, plain.keys) == (None, None, 0)
