"""Damaged and hostile traces: each one gives a one-line error that names the file, and reads nothing else.

`CASES` is the generator: every entry damages one fresh copy of a small trace. Entries that forge (`resign`, `rechain`)
keep the hashes right, so that what is tested is the check behind the hash.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from traces import GradreelError, TraceError, open_trace
from traces._json import dump_signed
from traces._pages import BadPageError, decoded_bytes
from traces.recover import recover
from traces.synthetic import write_synthetic
from traces.verify import verify_trace

UP = "layers.0.mlp.experts.gate_up_proj"
RANK = "rank-00000"
CHUNK, ROUTING, SEAL = (
    f"{RANK}/{name}" for name in ("chunk-000001.safetensors", "routing-000001.parquet", "seal-000001.json")
)


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "s.trace"
    write_synthetic(path, steps=12, chunk_steps=4, num_experts=4, tokens=64, width=4, hidden=4)
    return path


def read_everything(path: Path) -> None:
    """What a user would touch: every tensor, all routing, all scalars."""
    trace = open_trace(path)
    for step in trace.all_steps:
        for name in trace.infos:
            for stream in ("gradient", "weight"):
                trace.raw(stream, name, step)
            trace.raw("gradient", name, step, experts=[1]) if trace.param(name).expert_axis is not None else None
            trace.presence(name, step)
    trace.scalars()
    trace.params  # noqa: B018
    list(trace.routing_steps(0))
    trace.routing().collect()


def resign(path: Path, file: str, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a signed JSON file and give it a right hash again, and everything that names its hash."""
    target = path / file
    value = json.loads(target.read_text())
    value.pop("sha256")
    change(value)
    target.write_bytes(dump_signed(value)[0])
    rechain(path)


def rechain(path: Path) -> None:
    """Make every hash of the trace right: rank header, data files, seals, end."""
    rank = path / RANK

    def rewrite(file: Path, **fields: Any) -> str:
        value = json.loads(file.read_text())
        value.pop("sha256")
        value.update(fields)
        raw, digest = dump_signed(value)
        file.write_bytes(raw)
        return digest

    top = json.loads((path / "header.json").read_text())["sha256"]
    header = rewrite(rank / "header.json", header=top)
    previous = "0" * 64
    for seal in sorted(rank.glob("seal-*.json")):
        entries = json.loads(seal.read_text())["files"]
        for entry in entries if isinstance(entries, list) else []:
            data = rank / str(entry.get("name"))
            if data.is_file() and data.parent == rank and not data.is_symlink():
                entry.update(bytes=data.stat().st_size, sha256=hashlib.sha256(data.read_bytes()).hexdigest())
        previous = rewrite(seal, header=header, previous=previous, files=entries)
    rewrite(rank / "end.json", last_seal=previous)


def replace(path: Path, file: str, data: bytes, forge: bool) -> None:
    (path / file).write_bytes(data)
    if forge:
        rechain(path)


def chunk_with(header: Any, payload: bytes = b"", length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + payload


def tensor(begin: int, end: int, shape: Any = (1,), dtype: Any = "F32", **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end], **more}


def parquet_of(path: Path, **columns: Any) -> bytes:
    """The trace's own second routing file with columns replaced."""
    table = pq.read_table(path / ROUTING)
    names = table.column_names
    for name, column in columns.items():
        if column is None:
            table = table.drop_columns([name])
        elif name in names:
            table = table.set_column(names.index(name), name, column)
        else:
            table = table.append_column(name, column)
    sink = io.BytesIO()
    pq.write_table(table, sink, store_schema=False)
    return sink.getvalue()


Damage = Callable[[Path], Any]
CASES: dict[str, tuple[Damage, str]] = {}


def case(name: str, file: str) -> Callable[[Damage], Damage]:
    def add(damage: Damage) -> Damage:
        CASES[name] = (damage, Path(file).name)
        return damage

    return add


def chunk_case(name: str, data: bytes) -> None:
    CASES[f"chunk: {name}"] = (lambda path: replace(path, CHUNK, data, forge=True), Path(CHUNK).name)


def json_case(name: str, file: str, change: Callable[[dict[str, Any]], Any]) -> None:
    CASES[f"{Path(file).name}: {name}"] = (lambda path: resign(path, file, change), Path(file).name)


# ---- plain damage, hashes untouched
for _file in ("header.json", f"{RANK}/header.json", CHUNK, ROUTING, SEAL, f"{RANK}/end.json"):

    def _edit(path: Path, edit: Callable[[bytes], bytes], file: str = _file) -> None:
        (path / file).write_bytes(edit((path / file).read_bytes()))

    def _link(path: Path, file: str = _file) -> None:
        os.rename(path / file, path.parent / "elsewhere")
        os.symlink(path.parent / "elsewhere", path / file)

    def _pipe(path: Path, file: str = _file) -> None:
        (path / file).unlink()
        os.mkfifo(path / file)

    def _folder(path: Path, file: str = _file) -> None:
        (path / file).unlink()
        (path / file).mkdir()

    _name = Path(_file).name
    CASES[f"{_file}: empty"] = (lambda p, e=_edit: e(p, lambda b: b""), _name)  # type: ignore[misc]
    CASES[f"{_file}: cut by one byte"] = (lambda p, e=_edit: e(p, lambda b: b[:-1]), _name)  # type: ignore[misc]
    CASES[f"{_file}: cut in half"] = (lambda p, e=_edit: e(p, lambda b: b[: len(b) // 2]), _name)  # type: ignore[misc]
    CASES[f"{_file}: trailing byte"] = (lambda p, e=_edit: e(p, lambda b: b + b"\n"), _name)  # type: ignore[misc]
    CASES[f"{_file}: zeros"] = (lambda p, e=_edit: e(p, lambda b: bytes(len(b))), _name)  # type: ignore[misc]
    CASES[f"{_file}: link"] = (_link, _name)
    CASES[f"{_file}: pipe"] = (_pipe, _name)
    CASES[f"{_file}: folder"] = (_folder, _name)
    if _name != "end.json":
        CASES[f"{_file}: gone"] = (lambda p, f=_file: (p / f).unlink(), _name)  # type: ignore[misc]
CASES["rank folder gone"] = (lambda p: shutil.rmtree(p / RANK), RANK)
CASES["rank folder too many"] = (lambda p: (p / "rank-00001").mkdir(), "rank-00001")


@case("rank folder is a link", RANK)
def _(path: Path) -> None:
    os.rename(path / RANK, path.parent / "elsewhere-rank")
    os.symlink(path.parent / "elsewhere-rank", path / RANK)


@case("seals swapped", "seal-000000.json")
def _(path: Path) -> None:
    first, second = path / RANK / "seal-000000.json", path / SEAL
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)


@case("sparse header of 1 TiB", "header.json")
def _(path: Path) -> None:
    with open(path / "header.json", "r+b") as file:
        file.truncate(1 << 40)


# ---- forged safetensors, hashes right
chunk_case("shorter than a length", b"\0\0")
chunk_case("header longer than the file", chunk_with({}, length=1 << 20))
chunk_case("header of 2^63 bytes", chunk_with({}, length=1 << 63))
chunk_case("header is no JSON", chunk_with(b"{nope}"))
chunk_case("header is a list", chunk_with(b"[]"))
chunk_case("header is not UTF-8", chunk_with(b'{"\xff": 1}'))
chunk_case("deep nesting", chunk_with(b'{"a":' + b"[" * 200_000))
chunk_case(
    "duplicate key",
    chunk_with(
        b'{"5/s/a":' + json.dumps(tensor(0, 4)).encode() + b',"5/s/a":' + json.dumps(tensor(4, 8)).encode() + b"}",
        bytes(8),
    ),
)
chunk_case("same tensor twice", chunk_with({"5/s/a": tensor(0, 4), "05/s/a": tensor(4, 8)}, bytes(8)))
chunk_case("NaN in the header", chunk_with(b'{"5/s/a": NaN}'))
chunk_case("key without stream", chunk_with({"5": tensor(0, 4)}, bytes(4)))
chunk_case("key leaves the folder", chunk_with({"../../etc/passwd": tensor(0, 4)}, bytes(4)))
chunk_case("step of another seal", chunk_with({"99/gradient/x": tensor(0, 4)}, bytes(4)))
chunk_case("overlap", chunk_with({"5/s/a": tensor(0, 8, (2,)), "5/s/b": tensor(4, 12, (2,))}, bytes(12)))
chunk_case("hole", chunk_with({"5/s/a": tensor(0, 4), "5/s/b": tensor(8, 12)}, bytes(12)))
chunk_case("trailing bytes", chunk_with({"5/s/a": tensor(0, 4)}, bytes(5)))
chunk_case("out of range", chunk_with({"5/s/a": tensor(0, 4000, (1000,))}, bytes(4)))
chunk_case("backwards", chunk_with({"5/s/a": tensor(4, 0)}, bytes(4)))
chunk_case("negative", chunk_with({"5/s/a": tensor(-4, 0)}, bytes(4)))
chunk_case("shape lies", chunk_with({"5/s/a": tensor(0, 4, (1 << 40,))}, bytes(4)))
chunk_case("shape overflows to fit", chunk_with({"5/s/a": tensor(0, 4, (1 << 47, 1 << 47))}, bytes(4)))
chunk_case("17 dimensions", chunk_with({"5/s/a": tensor(0, 4, (1,) * 17)}, bytes(4)))
chunk_case("negative dimension", chunk_with({"5/s/a": tensor(0, 4, (-1, -1))}, bytes(4)))
chunk_case("boolean dimension", chunk_with({"5/s/a": tensor(0, 4, (True,))}, bytes(4)))
chunk_case("unknown dtype", chunk_with({"5/s/a": tensor(0, 4, dtype="F31")}, bytes(4)))
chunk_case("dtype is a list", chunk_with({"5/s/a": tensor(0, 4, dtype=[])}, bytes(4)))
chunk_case("unknown field", chunk_with({"5/s/a": tensor(0, 4, stride=1)}, bytes(4)))
chunk_case("metadata of numbers", chunk_with({"__metadata__": {"a": 1}}))
chunk_case("gradient of another shape", chunk_with({f"5/gradient/{UP}": tensor(0, 4)}, bytes(4)))


# ---- forged parquet, hashes right
def routing_case(name: str, make: Callable[[Path], bytes]) -> None:
    CASES[f"routing: {name}"] = (lambda path: replace(path, ROUTING, make(path), forge=True), Path(ROUTING).name)


def _rows(path: Path) -> int:
    return pq.read_metadata(path / ROUTING).num_rows


def _nulls(path: Path) -> bytes:
    return parquet_of(path, expert_0=pa.array([None] * _rows(path), pa.int8()))


routing_case("no parquet", lambda _: b"PAR1" + bytes(100) + b"PAR1")
routing_case("only the magic", lambda _: b"PAR1")
routing_case("footer length lies", lambda p: (p / ROUTING).read_bytes()[:-8] + struct.pack("<I", 1 << 30) + b"PAR1")
routing_case(
    "footer zeroed", lambda p: (p / ROUTING).read_bytes()[:-300] + bytes(292) + (p / ROUTING).read_bytes()[-8:]
)
routing_case("pages zeroed", lambda p: b"PAR1" + bytes(300) + (p / ROUTING).read_bytes()[304:])
routing_case("column missing", lambda p: parquet_of(p, is_pad=None))
routing_case("column too many", lambda p: parquet_of(p, expert_9=pa.array([0] * _rows(p), pa.int8())))
routing_case("ids are text", lambda p: parquet_of(p, expert_0=pa.array(["a"] * _rows(p))))
routing_case("ids are lists", lambda p: parquet_of(p, expert_0=pa.array([[1]] * _rows(p))))
routing_case("ids are null", _nulls)


@case("routing: one row too few", Path(ROUTING).name)
def _(path: Path) -> None:
    sink = io.BytesIO()
    pq.write_table(pq.read_table(path / ROUTING).slice(1), sink, store_schema=False)
    replace(path, ROUTING, sink.getvalue(), forge=True)


# ---- forged JSON, hashes right
json_case("another kind", "header.json", lambda v: v.update(kind="zip"))
json_case("another major version", "header.json", lambda v: v.update(format_version="2.0"))
json_case("version is a number", "header.json", lambda v: v.update(format_version=1.0))
json_case("unknown field", "header.json", lambda v: v.update(compression="zip"))
json_case("no params", "header.json", lambda v: v.pop("params"))
json_case("params is an object", "header.json", lambda v: v.update(params={}))
json_case("param listed twice", "header.json", lambda v: v["params"].append(v["params"][0]))
json_case("param of 2^60 elements", "header.json", lambda v: v["params"][0].update(shape=[1 << 30, 1 << 30]))
json_case("param with a line break", "header.json", lambda v: v["params"][0].update(name="a\nb"))
json_case("param of an unknown role", "header.json", lambda v: v["params"][0].update(role="sage"))
json_case("param of an unknown field", "header.json", lambda v: v["params"][0].update(sparse=True))
json_case("expert axis outside", "header.json", lambda v: v["params"][1].update(expert_axis=7))
json_case("one matrix axis", "header.json", lambda v: v["params"][1].update(matrix_axes=[1]))
json_case("layer without experts", "header.json", lambda v: v["layers"][0].update(num_experts=0))
json_case("a stream leaves the folder", "header.json", lambda v: v["streams"].append("../x"))
json_case("no rank", "header.json", lambda v: v.update(ranks=0))
json_case("provenance nested 40 deep", "header.json", lambda v: v.update(provenance=_nested(40)))
json_case("a forged not-a-number", "header.json", lambda v: v.update(run={"x": {"nonfinite": "1"}}))
json_case("sharded", f"{RANK}/header.json", lambda v: v.update(placements={"a": 1}))
json_case("another rank", f"{RANK}/header.json", lambda v: v.update(rank=1))
json_case("another number", SEAL, lambda v: v.update(number=7))
json_case("path leaves the folder", SEAL, lambda v: v["files"][0].update(name="../../chunk-000001.safetensors"))
json_case("absolute path", SEAL, lambda v: v["files"][0].update(name="/etc/chunk-000001.safetensors"))
json_case("file of another seal", SEAL, lambda v: v["files"][0].update(name="chunk-000000.safetensors"))
json_case("file listed twice", SEAL, lambda v: v["files"].append(v["files"][0]))
json_case("digits of another script", SEAL, lambda v: v["files"][0].update(name="chunk-00000١.safetensors"))
json_case("no steps", SEAL, lambda v: v.update(steps=[]))
json_case("steps run back", SEAL, lambda v: v["steps"].reverse())
json_case("steps of the seal before", SEAL, lambda v: (v.update(first_step=1), v["steps"][0].update(step=1)))
json_case("first step lies", SEAL, lambda v: v.update(first_step=6))
json_case("presence too short", SEAL, lambda v: v["steps"][0].update(presence="3"))
json_case("presence of 9", SEAL, lambda v: v["steps"][0].update(presence=v["steps"][0]["presence"].replace("3", "9")))
json_case("presence is a number", SEAL, lambda v: v["steps"][0].update(presence=3))
json_case("experts of nothing", SEAL, lambda v: v["steps"][0].update(experts={"nothing": [1]}))
json_case("expert 99", SEAL, lambda v: v["steps"][0].update(experts={UP: [99]}))
json_case("experts run back", SEAL, lambda v: v["steps"][0].update(experts={UP: [2, 1]}))
json_case("routing of layer 9", SEAL, lambda v: v["steps"][0].update(routing=[[9, 0, 64]]))
json_case("routing of a list", SEAL, lambda v: v["steps"][0].update(routing=[[[], 0, 64]]))
json_case("routing of 2^40 tokens", SEAL, lambda v: v["steps"][0].update(routing=[[0, 0, 1 << 40]]))
json_case("routing of too many tokens", SEAL, lambda v: v["steps"][0].update(routing=[[0, 0, 65]]))
json_case("scalar of 80 digits", SEAL, lambda v: v["steps"][0]["scalars"].update(loss=10**80))
json_case("recorded is text", SEAL, lambda v: v["steps"][0].update(recorded="yes"))
json_case("unknown field in a step", SEAL, lambda v: v["steps"][0].update(mood="good"))
json_case("too many seals", f"{RANK}/end.json", lambda v: v.update(seals=10**9))
json_case("unknown field", f"{RANK}/end.json", lambda v: v.update(mood="good"))
CASES["end.json: counts a seal less"] = (
    lambda p: resign(p, f"{RANK}/end.json", lambda v: v.update(seals=2)),
    "seal-000002.json",
)
CASES["end.json: counts a seal more"] = (
    lambda p: resign(p, f"{RANK}/end.json", lambda v: v.update(seals=5)),
    "seal-000004.json",
)
CASES["header.json: ten ranks"] = (lambda p: resign(p, "header.json", lambda v: v.update(ranks=10)), "rank-00001")


def _nested(depth: int) -> dict[str, Any]:
    return {"a": _nested(depth - 1)} if depth else {}


@pytest.mark.parametrize("name", CASES)
def test_damage_is_one_line_that_names_the_file(name: str, sound: Path, tmp_path: Path) -> None:
    damage, file = CASES[name]
    broken = tmp_path / "b.trace"
    shutil.copytree(sound, broken)
    damage(broken)
    with pytest.raises(TraceError) as error:
        read_everything(broken)
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 400
    assert file in message
    if file in (Path(CHUNK).name, Path(ROUTING).name):
        assert "(steps 5 to 8)" in message
    if file == Path(SEAL).name and "parquet" not in message:
        assert "steps after 4 are not reachable" in message


@pytest.mark.parametrize("name", CASES)
def test_verify_finds_it_and_recover_does_not_crash(name: str, sound: Path, tmp_path: Path) -> None:
    damage, file = CASES[name]
    broken = tmp_path / "b.trace"
    shutil.copytree(sound, broken)
    damage(broken)
    if name == "header.json: gone":
        with pytest.raises(TraceError, match=r"no header.json"):
            verify_trace(broken)
        return
    findings = verify_trace(broken)
    assert any(file in f.file or file in f.message for f in findings if f.severity == "damage"), findings
    assert all("\n" not in f.message for f in findings)
    refused = ""
    try:
        steps = recover(broken).steps
    except GradreelError as error:
        refused, steps = str(error), []
    assert "\n" not in refused
    assert steps[:1] in ([], [1])


@pytest.mark.parametrize(
    "change", [lambda v: v.update(x_mood="good"), lambda v: v.update(format_version="1.7", x_new={"a": 1})]
)
def test_ignorable_fields_and_newer_minor_versions_are_read(
    change: Callable[[Any], None], sound: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "c.trace"
    shutil.copytree(sound, copy)
    resign(copy, "header.json", change)
    read_everything(copy)
    assert verify_trace(copy) == []


def test_rechain_alone_changes_nothing(sound: Path, tmp_path: Path) -> None:
    """The forger itself is sound: without a change its output is the original, byte for byte."""
    copy = tmp_path / "c.trace"
    shutil.copytree(sound, copy)
    rechain(copy)
    for file in sound.rglob("*"):
        assert file.is_dir() or file.read_bytes() == (copy / file.relative_to(sound)).read_bytes()


def test_verify_checks_ids_and_keys_behind_right_hashes(sound: Path, tmp_path: Path) -> None:
    for number, (column, value, says) in enumerate(
        [
            ("expert_0", pa.array([99] * 256, pa.int8()), "outside -1 to 3"),
            ("step", pa.array([1] * 256), "step does not say 5"),
        ]
    ):
        copy = tmp_path / str(number)
        shutil.copytree(sound, copy)
        replace(copy, ROUTING, parquet_of(copy, **{column: value}), forge=True)
        assert [says in f.message for f in verify_trace(copy)] == [True]


def test_zero_row_groups_are_read_as_empty(sound: Path, tmp_path: Path) -> None:
    copy = tmp_path / "c.trace"
    shutil.copytree(sound, copy)
    table = pq.read_table(copy / ROUTING).slice(0, 0)
    with pq.ParquetWriter(copy / ROUTING, table.schema, store_schema=False):
        pass
    assert pq.read_metadata(copy / ROUTING).num_row_groups == 0

    def no_tokens(seal: dict[str, Any]) -> None:
        seal["files"][1].update(rows=0)
        for step in seal["steps"]:
            step["routing"] = [[0, 0, 0]]

    resign(copy, SEAL, no_tokens)
    trace = open_trace(copy)
    assert trace.verify() == []
    assert [len(s.is_pad) for s in trace.routing_steps(0)] == [64] * 4 + [0] * 4 + [64] * 4
    assert trace.routing().collect().height == 8 * 64


def test_pages_that_promise_too_much_are_refused(sound: Path, tmp_path: Path) -> None:
    """The metadata of the column is honest about its rows, but a page header asks for far more."""
    copy = tmp_path / "c.trace"
    shutil.copytree(sound, copy)
    raw = bytearray((copy / ROUTING).read_bytes())
    place = pq.read_metadata(copy / ROUTING).row_group(0).column(5).data_page_offset
    assert raw[place : place + 3] == b"\x15\x06\x15"  # DATA_PAGE_V2, then the decompressed size, two bytes of it
    assert raw[place + 3] >= 0x80 > raw[place + 4]
    raw[place + 4] |= 0x80  # the size swallows the bytes after it
    replace(copy, ROUTING, bytes(raw), forge=True)
    with pytest.raises(TraceError, match=r"routing-000001.parquet \(steps 5 to 8\): column 'expert_0'"):
        open_trace(copy).routing()


def test_page_sizes_are_added_up(sound: Path) -> None:
    file = pq.ParquetFile(sound / ROUTING)
    raw = (sound / ROUTING).read_bytes()
    for i in range(file.metadata.row_group(0).num_columns):
        column = file.metadata.row_group(0).column(i)
        start = column.dictionary_page_offset if column.has_dictionary_page else column.data_page_offset
        read = lambda offset, count: raw[offset : offset + count]  # noqa: E731
        total = decoded_bytes(read, start, column.total_compressed_size)
        assert 0 < column.total_uncompressed_size - total < 200  # the metadata counts the page headers too
        with pytest.raises(BadPageError):
            decoded_bytes(read, start, column.total_compressed_size - 1)


def test_a_list_of_nothing_without_end_is_refused() -> None:
    """2^60 elements of no size fit in five bytes; stepping over them one by one would take for ever."""
    count = bytes([0xF0]) + bytes([0xFF] * 8 + [0x0F])  # a list, its length as a number of its own, element kind 0
    header = bytes([0x19]) + count + bytes([0x00])
    with pytest.raises(BadPageError, match="malformed"):
        decoded_bytes(lambda offset, size: header[offset : offset + size], 0, len(header))


def test_a_bomb_is_refused_in_little_memory(sound: Path, tmp_path: Path) -> None:
    """A routing file that is small on disk and huge when decoded must not be decoded."""
    copy = tmp_path / "c.trace"
    shutil.copytree(sound, copy)
    rows = 4_000_000
    table = pq.read_table(copy / ROUTING)
    zeros = pa.table(
        {
            n: pa.repeat(pa.scalar(0 if n != "is_pad" else False, table.schema.field(n).type), rows)
            for n in table.column_names
        }
    )
    pq.write_table(zeros, copy / ROUTING, row_group_size=rows, compression="zstd", store_schema=False)
    assert (copy / ROUTING).stat().st_size < 200_000

    def many(seal: dict[str, Any]) -> None:
        seal["files"][1].update(rows=rows)
        seal["steps"][0]["routing"] = [[0, 0, rows - 3 * 64]]

    resign(copy, SEAL, many)
    program = (
        "import resource, sys\nfrom traces import open_trace\nimport polars, pyarrow.parquet\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try: open_trace(sys.argv[1]).routing().collect()\n"
        "except ValueError as error: print(error)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(copy)], capture_output=True, text=True, check=True)
    message, grown_kib = done.stdout.splitlines()
    assert "row group 0 has 4000000 rows" in message
    assert int(grown_kib) < 40_000
