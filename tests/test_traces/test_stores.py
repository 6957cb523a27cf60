"""Traces behind URLs: an in-memory store, and a local server that speaks S3."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

fsspec = pytest.importorskip("fsspec", reason="object stores are optional; `make test` installs them")

from traces import GradreelError, Recorder, TraceError, open_trace  # noqa: E402
from traces import _store as store  # noqa: E402
from traces._copies import COPIES, Copies  # noqa: E402
from traces._store import StoreError, StorePath, as_place  # noqa: E402
from traces.console import run  # noqa: E402
from traces.recover import recover  # noqa: E402
from traces.synthetic import write_synthetic  # noqa: E402
from traces.verify import verify_trace  # noqa: E402
from traces.writer import TraceWriter  # noqa: E402

SMALL: dict[str, Any] = {"steps": 6, "chunk_steps": 3, "num_experts": 4, "tokens": 32, "width": 4, "hidden": 4}


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """A bucket of a server on this machine; its URL."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # moto asks for packages that S3 does not need
        from moto.server import ThreadedMotoServer
    import logging

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    before = dict(os.environ)
    os.environ.update(
        AWS_ACCESS_KEY_ID="x",
        AWS_SECRET_ACCESS_KEY="x",
        AWS_DEFAULT_REGION="us-east-1",
        AWS_EC2_METADATA_DISABLED="true",
    )
    os.environ["AWS_ENDPOINT_URL"] = f"http://{host}:{port}"
    from s3fs import S3FileSystem

    S3FileSystem.clear_instance_cache()
    S3FileSystem().mkdir("reels")
    yield "s3://reels"
    S3FileSystem.clear_instance_cache()
    server.stop()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(params=["memory", "s3"])
def base(request: pytest.FixtureRequest) -> Iterator[str]:
    """A URL to put traces below, in each kind of store."""
    name = request.node.name.translate(str.maketrans("[]", "--"))
    if request.param == "memory":
        yield f"memory://reels/{name}"
        fsspec.filesystem("memory").store.clear()
    else:
        yield f"{request.getfixturevalue('s3')}/{name}"
    COPIES.clear()


def fs_of(url: str) -> tuple[Any, str]:
    place = as_place(url)
    assert isinstance(place, StorePath)
    return place.fs, place.key


def read_all(url: str) -> None:
    """Read everything, from the store itself: a copy from before it was damaged is sound."""
    COPIES.clear()
    trace = open_trace(url)
    for step in trace.steps:
        trace.gradient(next(iter(trace.infos)), step)
    trace.routing().collect()


def test_what_is_read_is_what_a_folder_gives(base: str, tmp_path: Path) -> None:
    url, local = f"{base}/a.trace", tmp_path / "a.trace"
    write_synthetic(url, **SMALL)
    write_synthetic(local, **SMALL)
    there, here = open_trace(url), open_trace(local)
    assert there.id == here.id
    assert there.finished
    assert there.verify() == []
    assert there.all_steps == here.all_steps
    assert there.scalars().equals(here.scalars())
    assert there.routing().collect().equals(here.routing().collect())
    for check in (True, False):
        again = open_trace(url, check_hash=check)
        for step in here.all_steps:
            for name in here.infos:
                for stream in ("gradient", "weight"):
                    a, b = again.raw(stream, name, step), here.raw(stream, name, step)
                    assert (a is None) == (b is None)
                    assert a is None or (a.data.tobytes() == b.data.tobytes() and a.shape == b.shape)  # type: ignore[union-attr]
    stacked = next(p.name for p in here.header.params if p.expert_axis == 0)
    some = there.raw("gradient", stacked, here.steps[0], [2, 0])
    assert some is not None
    assert (some.data == here.raw("gradient", stacked, here.steps[0], [2, 0]).data).all()  # type: ignore[union-attr]
    files = {f.relative_to(local).as_posix(): f.read_bytes() for f in local.rglob("*") if f.is_file()}
    fs, key = fs_of(url)
    assert {str(k).split("a.trace/")[1] for k in fs.find(key)} == set(files)
    for name, raw in files.items():
        assert fs.cat_file(f"{key}/{name}") == raw


def test_every_verb_takes_a_url(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from ablations.cli import build_app

    monkeypatch.chdir(tmp_path)
    url = f"{s3}/verbs/v.trace"
    write_synthetic(url, **SMALL)
    for words in (
        ["info", url],
        ["info", url, "--follow"],
        ["verify", url],
        ["replay", url, "-r", "sgd", "-m", "update_rms"],
        ["compare", url, "-r", "sgd", "-r", "lion"],
    ):
        assert run(build_app(), words) == 0, (words, capsys.readouterr())
    shown = capsys.readouterr().out
    assert url in shown
    assert "finished: 6 steps" in shown
    assert (tmp_path / "v.replay.parquet").is_file()
    assert run(build_app(), ["recover", url]) == 2
    assert "copy it to this machine" in capsys.readouterr().err
    assert run(build_app(), ["report", f"{s3}/none.parquet"]) == 2
    assert "copy it here" in capsys.readouterr().err


def test_a_live_run_is_recorded(base: str, make_model: Callable[..., Any], batches: Any, parts: Any) -> None:
    import torch

    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with Recorder(f"{base}/live.trace", model, optimizer, notify=lambda line: None) as reel:
        for batch in batches[:4]:
            optimizer.zero_grad()
            loss = parts.loss(model, batch)
            loss.backward()
            gradient = model.layers[1].experts.up_proj.grad.clone()
            optimizer.step()
            reel.log(loss=loss.item())
    trace = open_trace(f"{base}/live.trace")
    assert trace.steps == [1, 2, 3, 4]
    assert trace.verify() == []
    assert torch.equal(trace.gradient("layers.1.experts.up_proj", 4), gradient)
    with pytest.raises(GradreelError, match="already holds a trace"):
        Recorder(f"{base}/live.trace", model, optimizer)


def test_damage_in_a_store_is_one_line(base: str) -> None:
    url = f"{base}/d.trace"
    write_synthetic(url, **SMALL)
    fs, key = fs_of(url)
    for name in ("header.json", "rank-00000/chunk-000001.safetensors", "rank-00000/routing-000000.parquet"):
        place = f"{key}/{name}"
        sound = fs.cat_file(place)
        flipped = bytearray(sound)
        flipped[len(sound) // 2] ^= 1
        changes = (bytes(flipped), sound[:-3], sound + b"x", b"")
        for damaged in changes if base.startswith("memory") else (changes[0], changes[3]):
            fs.pipe_file(place, damaged)
            found = [f for f in verify_trace(url) if f.severity == "damage"]
            assert found, name
            assert name.rsplit("/", 1)[-1] in found[0].message
            with pytest.raises(TraceError, match=name.rsplit("/", 1)[-1]) as error:
                read_all(url)
            assert "\n" not in str(error.value)
        fs.rm_file(place)
        with pytest.raises(TraceError):
            read_all(url)
        fs.pipe_file(place, sound)
    assert verify_trace(url) == []


def test_an_unfinished_trace_is_read_and_followed(base: str) -> None:
    """Two looks at a trace that grows: each shows the seals of its moment, and refresh takes in the rest."""
    url = f"{base}/grow.trace"
    writer = TraceWriter(url, HEADER, chunk_steps=2)
    writer.append(step_record(1))
    writer.append(step_record(2))
    trace = open_trace(url)
    assert trace.steps == [1, 2]
    assert not trace.finished
    assert not trace.refresh()
    for step in (3, 4, 5):
        writer.append(step_record(step))
    assert trace.steps == [1, 2]
    assert trace.refresh()
    assert trace.steps == [1, 2, 3, 4]
    assert (trace.raw("gradient", "w", 4).data == 4).all()  # type: ignore[union-attr]
    writer.close()
    assert trace.refresh()
    assert trace.finished
    assert trace.steps == [1, 2, 3, 4, 5]
    assert not trace.refresh()
    assert trace.id == open_trace(url).id


def test_a_second_run_into_one_place_is_refused(base: str) -> None:
    writer = TraceWriter(f"{base}/two.trace", HEADER)
    with pytest.raises(TraceError, match="already holds a trace"):
        TraceWriter(f"{base}/two.trace", HEADER)
    writer.append(step_record(1))
    writer.close()
    assert open_trace(f"{base}/two.trace").steps == [1]


# ------------------------------------------------------------------------------------------------- a store that fails

from traces.schema import Header, LayerInfo, RawTensor, RoutingRecord, StepRecord  # noqa: E402
from traces.views import ParamInfo  # noqa: E402

HEADER = Header(params=(ParamInfo("w", "router", (8, 8)),), layers=(LayerInfo(0, "m", 4, 2),))


def step_record(step: int) -> StepRecord:
    data = np.full((8, 8), step, np.float32)
    routing = RoutingRecord(0, 0, np.full((50, 2), step % 4), np.zeros(50, bool))
    return StepRecord(step, {("gradient", "w"): RawTensor("float32", data.shape, data)}, routing=[routing])


class Outage:
    """Lets calls of a store through, or fails them as a network does, before or after the store has obeyed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.down = self.answer_lost = False
        self.calls = 0
        through = StorePath._call

        def call(path: StorePath, action: Callable[[], Any]) -> Any:
            self.calls += 1
            if self.down and self.answer_lost:
                through(path, action)
            if self.down:
                raise StoreError("EndpointConnectionError: no route to the store")
            return through(path, action)

        monkeypatch.setattr(StorePath, "_call", call)


@pytest.fixture
def outage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Outage]:
    yield Outage(monkeypatch)
    fsspec.filesystem("memory").store.clear()
    COPIES.clear()


@pytest.mark.parametrize("answer_lost", [False, True])
def test_an_outage_costs_steps_and_no_more(outage: Outage, answer_lost: bool) -> None:
    outage.answer_lost = answer_lost
    writer = TraceWriter("memory://out.trace", HEADER, chunk_steps=2)
    taken = []
    for step in range(1, 13):
        outage.down = 4 <= step <= 7
        try:
            writer.append(step_record(step))
            taken.append(step)
        except OSError as error:
            assert "no route" in str(error)  # noqa: PT017
    writer.close()
    assert 4 not in taken
    trace = open_trace("memory://out.trace")
    assert trace.steps == taken
    assert trace.verify() == []


@pytest.mark.parametrize("answer_lost", [False, True])
def test_an_outage_at_the_end(outage: Outage, answer_lost: bool) -> None:
    """What was put although its answer was lost does not lie beyond the end."""
    outage.answer_lost = answer_lost
    writer = TraceWriter("memory://out.trace", HEADER, chunk_steps=4)
    for step in range(1, 7):
        writer.append(step_record(step))
    outage.down = True
    with pytest.raises(OSError, match="no route"):
        writer.close()
    outage.down = False
    writer.close(discard=True)
    trace = open_trace("memory://out.trace")
    assert (trace.steps, trace.lost_steps) == ([1, 2, 3, 4], 2)
    assert {finding.severity for finding in trace.verify()} == {"note"}


@pytest.mark.parametrize("strict", [False, True])
def test_training_goes_on_without_its_store(
    outage: Outage, strict: bool, make_model: Callable[..., Any], batches: Any, parts: Any, notes: list[str]
) -> None:
    import torch

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = 0

    def train() -> None:
        nonlocal steps
        with Recorder("memory://t.trace", model, optimizer, strict=strict, notify=notes.append) as reel:
            outage.down = True
            for batch in batches:
                optimizer.zero_grad()
                parts.loss(model, batch).backward()
                optimizer.step()
                reel.flush()
                steps += 1

    if strict:
        with pytest.raises(GradreelError, match="no route"):
            train()
        assert steps < len(batches)
    else:
        train()
        assert steps == len(batches)
        assert any("steps could not be written" in note and "no route" in note for note in notes)


def test_a_reader_without_its_store_says_so_in_one_line(outage: Outage) -> None:
    write_synthetic("memory://r.trace", **SMALL)
    trace = open_trace("memory://r.trace")
    outage.down = True
    for action in (
        lambda: open_trace("memory://r.trace"),
        lambda: trace.gradient(next(iter(trace.infos)), trace.steps[0]),
        lambda: trace.routing().collect(),
        lambda: trace.refresh() or open_trace("memory://r.trace"),
        lambda: Recorder("memory://r2.trace", __import__("torch").nn.Linear(1, 1)),
    ):
        with pytest.raises(GradreelError) as error:
            action()
        assert "\n" not in str(error.value)


# ---------------------------------------------------------------------------------------------- places, copies, bounds


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(GradreelError, match=r"fsspec is not installed; pip install 'gradreel\[stores\]'"):
        open_trace("s3://reels/a.trace")
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "s3fs", None)
    from fsspec.registry import _registry

    monkeypatch.delitem(_registry, "s3", raising=False)
    with pytest.raises(GradreelError, match=r"needs a package that is not installed .*gradreel\[stores\]"):
        open_trace("s3://reels/a.trace")


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("s9://reels/a.trace", "Protocol not known"),
        ("memory://", "names no folder"),
        ("memory://reels/none.trace", "does not exist"),
        (Path("s3://reels/a.trace"), "give the URL as text"),
    ],
)
def test_a_place_that_cannot_be_is_one_line(place: Any, says: str) -> None:
    with pytest.raises(GradreelError, match=says) as error:
        open_trace(place)
    assert "\n" not in str(error.value)


def test_file_urls_are_folders(tmp_path: Path) -> None:
    write_synthetic(f"file://{tmp_path}/f.trace", **SMALL)
    assert open_trace(tmp_path / "f.trace").id == open_trace(f"file://{tmp_path}/f.trace").id
    assert recover(f"file://{tmp_path}/f.trace").changed is False


def test_passwords_and_signatures_are_not_shown() -> None:
    assert store._without_secrets("ftp://ann:secret@host/a.trace") == "ftp://...@host/a.trace"
    assert "secret" not in store._without_secrets("https://host/a.trace?sig=secret")


def test_copies_are_bounded_shared_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    from traces import _copies

    write_synthetic("memory://c.trace", **{**SMALL, "steps": 12})
    monkeypatch.setattr(_copies, "KEPT_BYTES", 20_000)
    trace = open_trace("memory://c.trace")
    for _ in range(2):
        for step in trace.steps:
            for name in trace.infos:
                trace.raw("gradient", name, step)
    assert 0 < COPIES.bytes() <= 20_000
    folder = COPIES._folder
    assert folder is not None
    on_disk = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    assert on_disk <= 20_000
    assert folder.stat().st_mode & 0o077 == 0
    COPIES.clear()
    assert not folder.exists()
    assert trace.raw("gradient", next(iter(trace.infos)), trace.steps[0]) is not None  # fetched and checked again
    COPIES.clear()
    fsspec.filesystem("memory").store.clear()


def test_a_killed_reader_s_copies_go_with_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tempfile
    import time

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / "gradreel-copies-left"
    (left / "x").mkdir(parents=True)
    (left / "lock").touch()
    os.utime(left, (time.time() - 3600,) * 2)
    other, mine = Copies(), Copies()
    lives = other._root()
    os.utime(lives, (time.time() - 3600,) * 2)
    mine._root()
    assert not left.exists()
    assert lives.exists()
    mine.clear()
    other.clear()
    assert list(tmp_path.iterdir()) == []


def test_a_file_larger_than_its_seal_is_not_fetched(outage: Outage) -> None:
    """A store that has gigabytes where a seal declares kilobytes is refused by size, before a byte is read."""
    write_synthetic("memory://big.trace", **SMALL)
    fs, key = fs_of("memory://big.trace")
    name = f"{key}/rank-00000/chunk-000000.safetensors"
    fs.pipe_file(name, fs.cat_file(name) + bytes(1 << 20))
    read: list[int] = []
    fs_cat = fs.cat_file
    trace = open_trace("memory://big.trace")
    fs.cat_file = lambda path, start=None, end=None: read.append((end or 0) - (start or 0)) or fs_cat(path, start, end)
    try:
        with pytest.raises(TraceError, match="longer than sealed"):
            trace.raw("gradient", next(iter(trace.infos)), trace.steps[0])
        assert sum(read) < 100_000  # the seal alone
        fs.pipe_file(f"{key}/header.json", bytes(65 << 20))
        with pytest.raises(TraceError, match="at most"):
            open_trace("memory://big.trace")
        assert sum(read) < 100_000
    finally:
        del fs.cat_file
