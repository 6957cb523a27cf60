"""Traces that a stranger forged, through everything that reads one: each use works or gives one line.

Every mutation makes all hashes right again, so that the checks behind them are met: values, names and sizes in the
JSON files, headers of chunks, bytes of parquet. The uses are local reads, reads from a store, following, slicing,
comparing and exporting. None may crash, hang, write outside its output, or take more than 64 MiB beside twice the
decoded size.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from traces import GradreelError, open_trace
from traces._copies import COPIES
from traces._json import dump_signed
from traces.differences import first_difference
from traces.follow import follow
from traces.interchange import export_routing, export_tensors
from traces.slicing import slice_trace
from traces.synthetic import write_synthetic
from traces.verify import verify_trace

fsspec = pytest.importorskip("fsspec", reason="object stores are optional; `make test` installs them")

RANK = "rank-00000"
LIMIT_BYTES = 64 << 20
#: What a stranger may write where a number, a name or a list belongs.
VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**53,
    2**63 - 1,
    10**30,
    0.5,
    1e308,
    "",
    "x" * 5000,
    "../../etc/passwd",
    "/etc/passwd",
    "chunk-000000.safetensors",
    "a\nb\x1b[31m",
    "\ud800",
    [],
    [[]],
    {},
    {"nonfinite": "nan"},
    [0] * 300,
    ["w"],
    {"a": {"b": {"c": [1]}}},
]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "s.trace"
    write_synthetic(path, steps=4, chunk_steps=2, num_experts=3, tokens=12, width=3, hidden=3)
    return path


# --------------------------------------------------------------------------------------------------------- mutations


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a JSON value can be changed."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def change_json(value: dict[str, Any], rng: random.Random) -> None:
    """Replace, remove, repeat or add something somewhere."""
    *path, last = rng.choice(list(places(value)))
    holder: Any = value
    for key in path:
        holder = holder[key]
    match rng.randrange(6):
        case 0:
            del holder[last]
        case 1 if isinstance(holder, list):
            holder.append(holder[last])
        case 1 | 2:
            other = rng.choice(list(places(value)))
            found: Any = value
            for key in other:
                found = found[key]
            holder[last] = json.loads(json.dumps(found))
        case 3 if isinstance(holder[last], int):
            holder[last] = holder[last] + rng.choice((-1, 1, 255, 1 << 40))
        case _:
            holder[last] = rng.choice(VALUES)
    if rng.random() < 0.1:
        value[rng.choice(("x_new", "new", "kind"))] = rng.choice(VALUES)


def encode(value: dict[str, Any]) -> tuple[bytes, str]:
    """As the writer does, and in another way where that refuses (a lone surrogate)."""
    with contextlib.suppress(GradreelError):
        return dump_signed(value)
    text = json.dumps(value)[:-1].encode()
    digest = hashlib.sha256(text).hexdigest()
    return text + f',"sha256":"{digest}"}}\n'.encode(), digest


def mutate(path: Path, rng: random.Random) -> str:
    """Change one thing in a trace and make every hash right; return what was changed."""
    files = sorted(f for f in path.rglob("*") if f.is_file())
    file = rng.choice(files)
    if file.suffix == ".json":
        value = json.loads(file.read_text())
        value.pop("sha256")
        for _ in range(rng.choice((1, 1, 1, 2))):
            if value:
                change_json(value, rng)
        file.write_bytes(encode(value)[0])
    elif file.suffix == ".safetensors" and rng.random() < 0.8:
        raw = file.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        change_json(header, rng)
        text = json.dumps(header).encode()
        file.write_bytes(
            struct.pack("<Q", rng.choice((len(text), len(text), length, 2**62))) + text + raw[8 + length :]
        )
    else:
        changed = bytearray(file.read_bytes())
        for _ in range(rng.randrange(1, 6)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        if rng.random() < 0.2:
            del changed[rng.randrange(len(changed)) :]
        file.write_bytes(changed)
    rechain(path, file)
    return f"{file.name}: {file.read_bytes()[:4000]!r}"


def rechain(path: Path, changed: Path) -> None:
    """Give every file its right hash, and every file that names it; what is no such file any more stays as it is."""

    def rewrite(file: Path, **fields: Any) -> str:
        try:
            value = json.loads(file.read_text())
        except (ValueError, OSError):
            return "0" * 64
        value.pop("sha256", None)
        for key, item in fields.items():
            if key in value:
                value[key] = item
        raw, digest = encode(value)
        file.write_bytes(raw)
        return digest

    rank = path / RANK
    top = rewrite(path / "header.json")
    header = rewrite(rank / "header.json", header=top)
    previous = "0" * 64
    for seal in sorted(rank.glob("seal-*.json")):
        value = json.loads(seal.read_text())
        entries = value.get("files")
        for entry in entries if isinstance(entries, list) else []:
            name = entry.get("name") if isinstance(entry, dict) else None
            if name == changed.name:  # a seal that itself was changed keeps the sizes that it lies about
                data = changed.read_bytes()
                entry.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        fields = {"header": header, "previous": previous, **({"files": entries} if "files" in value else {})}
        previous = rewrite(seal, **fields)
    rewrite(rank / "end.json", last_seal=previous)


# -------------------------------------------------------------------------------------------------------------- uses


def read_all(place: Any) -> None:
    trace = open_trace(place)
    for step in trace.all_steps:
        for name in trace.infos:
            for stream in ("gradient", "weight"):
                trace.raw(stream, name, step)
            trace.presence(name, step)
    trace.scalars()
    trace.params  # noqa: B018
    for layer in trace.layers:
        list(trace.routing_steps(layer.layer))
    trace.routing().collect()


def remote(path: Path, out: Path, sound: Path) -> None:
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    for file in path.rglob("*"):
        if file.is_file():
            fs.pipe_file(f"/m/{file.relative_to(path.parent).as_posix()}", file.read_bytes())
    try:
        read_all(f"memory://m/{path.name}")
    finally:
        COPIES.clear()


def shown(path: Path, out: Path, sound: Path) -> None:
    from rich.console import Console

    from traces._info import print_info

    with open(os.devnull, "w") as nowhere:
        print_info(Console(file=nowhere, width=80), open_trace(path, check_hash=False))


def tensors(path: Path, out: Path, sound: Path) -> None:
    export_tensors(open_trace(path), out)


def followed(path: Path, out: Path, sound: Path) -> None:
    lines: list[str] = []

    def gone(seconds: float) -> None:
        raise GradreelError("looked once")

    follow(path, lines.append, sleep=gone)
    assert all("\n" not in line for line in lines)


USES: list[Callable[[Path, Path, Path], Any]] = [
    lambda path, out, sound: read_all(path),
    lambda path, out, sound: read_all(path),
    remote,
    remote,
    shown,
    followed,
    lambda path, out, sound: slice_trace(open_trace(path), out, steps=(2, None), experts=[0, 2]),
    lambda path, out, sound: slice_trace(open_trace(path), out, params="*up*"),
    lambda path, out, sound: first_difference(open_trace(path), open_trace(sound)),
    lambda path, out, sound: export_routing(open_trace(path), out, kind="csv"),
    lambda path, out, sound: export_routing(open_trace(path), out, kind="megatron"),
    tensors,
]


def use_mutated(sound: Path, folder: Path, rounds: int, seed: int) -> int:
    """Mutate and use a trace `rounds` times; return how many uses were refused."""
    rng = random.Random(seed)
    decoded = sum(f.stat().st_size for f in sound.rglob("*") if f.is_file()) * 4
    path, out = folder / "m.trace", folder / "out"
    refused = 0
    for number in range(rounds):
        shutil.copytree(sound, path)
        what = mutate(path, rng)
        use = rng.choice(USES)
        began = time.process_time()
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        try:
            use(path, out, sound)
        except GradreelError as error:
            refused += 1
            assert "\n" not in str(error), (number, what)  # noqa: PT017
            assert str(error).isprintable(), (number, what, str(error))  # noqa: PT017
        except BaseException as error:  # with what was changed, so that it can be made again
            raise AssertionError(f"mutation {number} of seed {seed}: {what}") from error
        grown = tracemalloc.get_traced_memory()[1] - before
        assert grown < LIMIT_BYTES + 2 * decoded, (number, grown, what)
        assert time.process_time() - began < 20, (number, what)
        if number % 10 == 0:
            verify_trace(path) if (path / "header.json").exists() else None
        assert {p.name for p in folder.iterdir()} <= {"m.trace", "out"}, what
        shutil.rmtree(path)
        shutil.rmtree(out, ignore_errors=True)
        out.unlink(missing_ok=True)
    return refused


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()
    fsspec.filesystem("memory").store.clear()


def test_forged_traces_through_every_use(sound: Path, tmp_path: Path, traced: None) -> None:
    refused = use_mutated(sound, tmp_path, 200, seed=1)
    assert 40 < refused < 200  # most mutations are met by a check, and the sound part of some is used


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_forged_traces_through_every_use_at_length(sound: Path, tmp_path: Path, traced: None) -> None:
    refused = use_mutated(sound, tmp_path, 10_000, seed=2)
    assert 2_000 < refused < 10_000
