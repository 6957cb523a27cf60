"""Logs of other tools in and out: round trips, what measures see, and lines that are no log."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from traces import GradreelError, TraceError, open_trace
from traces.interchange import _import, export_routing, export_tensors, import_routing
from traces.slicing import slice_trace
from traces.synthetic import write_synthetic

#: As Megatron-LM writes them: spaces after separators, a layer of multi-token prediction, micro-steps in a row.
LINE = (
    '{"step": %d, "stage": "pre_dispatch", "block": "%s", "layer": %d, "rank": %d, "num_tokens": %d, "topk": %d%s, '
    '"top_indices": %s}\n'
)


def write_log(folder: Path, ranks: int = 1, seed: int = 0) -> dict[tuple[int, int, int], np.ndarray]:
    """A folder of RouterTracer logs; return the ids by (step, layer as imported, rank), micro-steps joined."""
    rng = np.random.default_rng(seed)
    folder.mkdir()
    expected: dict[tuple[int, int, int], list[Any]] = {}
    for rank in range(ranks):
        with open(folder / f"router_trace_rank{rank}.jsonl", "w") as file:
            for step in (0, 1, 4):
                for _ in range(2):
                    for number, (block, layer, mtp) in {
                        1: ("decoder", 1, ""),
                        3: ("decoder", 3, ""),
                        4: ("mtp", 1, ', "mtp_idx": 0'),
                    }.items():
                        ids = rng.integers(0, 8, (int(rng.integers(1, 6)), 2))
                        file.write(LINE % (step, block, layer, rank, len(ids), 2, mtp, ids.tolist()))
                        expected.setdefault((step, number, rank), []).append(ids)
    return {key: np.concatenate(parts) for key, parts in expected.items()}


@pytest.mark.parametrize("ranks", [1, 2])
def test_router_tracer_there_and_back(tmp_path: Path, ranks: int) -> None:
    expected = write_log(tmp_path / "log", ranks)
    trace = open_trace(import_routing(tmp_path / "log", tmp_path / "a.trace"))
    assert trace.verify() == []
    assert trace.finished
    assert trace.steps == [0, 1, 4]
    assert [(x.layer, x.num_experts, x.top_k) for x in trace.layers] == [(1, 8, 2), (3, 8, 2), (4, 8, 2)]
    for step in trace.steps:
        for layer in (1, 3, 4):
            joined = np.concatenate([expected[step, layer, rank] for rank in range(ranks)])
            routing = trace.routing_step(step, layer)
            assert routing is not None
            assert np.array_equal(routing.topk_expert_ids, joined)
            assert np.array_equal(routing.tokens_per_expert, np.bincount(joined.reshape(-1), minlength=8))
    export_routing(trace, tmp_path / "back", kind="megatron")
    for rank in range(ranks):
        name = f"router_trace_rank{rank}.jsonl"
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "log" / name).read_bytes()


def test_csv_there_and_back(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "a.trace", steps=5, num_experts=6, tokens=40, width=4, hidden=4, padding=0.25)
    trace = open_trace(tmp_path / "a.trace")
    export_routing(trace, tmp_path / "a.csv")
    again = open_trace(import_routing(tmp_path / "a.csv", tmp_path / "b.trace", num_experts=6))
    assert again.steps == trace.steps
    for step in trace.steps:
        a, b = trace.routing_step(step, 0), again.routing_step(step, 0)
        assert a is not None
        assert b is not None
        assert np.array_equal(a.topk_expert_ids[~a.is_pad], b.topk_expert_ids)
        assert np.array_equal(a.tokens_per_expert, b.tokens_per_expert)
    export_routing(again, tmp_path / "b.csv")
    assert (tmp_path / "b.csv").read_bytes() == (tmp_path / "a.csv").read_bytes()


def test_a_csv_of_layer_and_expert_alone(tmp_path: Path) -> None:
    """A step begins where the layer goes down; each line is a token, or top_k of them are."""
    log = tmp_path / "moe_trace.csv"
    log.write_text("layer,expert\n0,3\n0,1\n1,2\n1,2\n0,1\n0,0\n2,5\n2,4\r\n")
    trace = open_trace(import_routing(log, tmp_path / "a.trace"))
    assert trace.steps == [0, 1]
    assert [(x.layer, x.num_experts, x.top_k) for x in trace.layers] == [(0, 4, 1), (1, 3, 1), (2, 6, 1)]
    assert trace.routing_step(0, 1).tokens_per_expert.tolist() == [0, 0, 2]  # type: ignore[union-attr]
    paired = open_trace(import_routing(log, tmp_path / "b.trace", top_k=2, num_experts=8))
    assert paired.routing_step(1, 2).topk_expert_ids.tolist() == [[5, 4]]  # type: ignore[union-attr]
    with pytest.raises(TraceError, match=r"moe_trace.csv line 2: .*2 activations, which top_k 3 does not divide"):
        import_routing(log, tmp_path / "c.trace", top_k=3)


def test_columns_in_any_order_and_others_beside_them(tmp_path: Path) -> None:
    log = tmp_path / "a.csv"
    log.write_text(
        '\ufeff"Token",phase, layer_id ,Expert,step\n0,"fill",2,1,7\n0,fill,2,0,7\n\n3,more,2,-1,7\n0,x,2,1,9\n'
    )
    trace = open_trace(import_routing(log, tmp_path / "a.trace"))
    assert trace.steps == [7, 9]
    assert trace.routing_step(7, 2).topk_expert_ids.tolist() == [[1, 0], [-1, -1]]  # type: ignore[union-attr]


def test_load_is_measured_without_gradients_and_without_recipes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from toolkit import replay

    expected = write_log(tmp_path / "log")
    trace = open_trace(import_routing(tmp_path / "log", tmp_path / "a.trace"))
    frame = replay(trace, [], metrics=["max_vio", "tokens_per_expert"], per_expert=["tokens_per_expert"]).frame
    counts = np.bincount(expected[4, 3, 0].reshape(-1), minlength=8)
    row = next(r for r in frame.iter_rows(named=True) if (r["metric"], r["step"], r["layer"]) == ("max_vio", 4, 3))
    assert row["value"] == pytest.approx(counts.max() / counts.mean() - 1)
    with pytest.raises(GradreelError, match="gradient"):
        replay(trace, [], metrics=["grad_norm"])
    with pytest.raises(GradreelError, match="no gradients to replay"):
        replay(trace, ["adamw"])


def test_the_verbs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from ablations.cli import build_app
    from traces.console import run

    monkeypatch.chdir(tmp_path)
    write_log(tmp_path / "log", 2)
    write_synthetic("x.trace", steps=4, num_experts=4, tokens=16, width=4, hidden=4)
    assert run(build_app(), ["import", "log", "a.trace", "--num-experts", "16"]) == 0
    assert run(build_app(), ["replay", "a.trace", "--metric", "max_vio"]) == 0
    assert run(build_app(), ["replay", "a.trace"]) == 0
    assert run(build_app(), ["export", "a.trace", "a.csv", "--steps", "1:"]) == 0
    assert run(build_app(), ["export", "x.trace", "g", "--to", "safetensors", "--steps", "2:3"]) == 0
    shown = capsys.readouterr().out
    assert "3 steps, 3 MoE layers (16 experts, top-2)" in shown
    assert "a.csv: routing of 2 steps" in shown
    assert sorted(p.name for p in Path("g").iterdir()) == ["gradient-000002.safetensors", "gradient-000003.safetensors"]
    for words, says in (
        (["export", "x.trace", "y"], "say what to write"),
        (["export", "x.trace", "y", "--to", "pickle"], "unknown kind of file"),
        (["export", "x.trace", "a.csv"], "is there already"),
        (["export", "x.trace", "y.csv", "--params", "w"], "belongs to no parameter"),
        (["export", "x.trace", "y", "--to", "safetensors", "--steps", "9:"], "no step of x.trace is chosen"),
        (["export", "x.trace", "y", "--to", "safetensors", "--params", "nothing"], "no parameter matches"),
        (["export", "a.trace", "y", "--to", "safetensors"], "no parameter matches"),
        (["import", "log", "a.trace"], "already holds a trace"),
        (["import", "none", "b.trace"], "does not exist"),
        (["import", "log", "b.trace", "--num-experts", "3"], "ids run from -1"),
        (["import", "log", "b.trace", "--top-k", "2"], "belongs to a CSV"),
    ):
        assert run(build_app(), words) == 2, words
        error = capsys.readouterr().err
        assert says in error.replace("\n", " "), (words, error)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_are_bit_equal(tmp_path: Path, dtype: str) -> None:
    """The safetensors library reads the bits that were recorded, into the same shapes."""
    write_synthetic(
        tmp_path / "a.trace", steps=4, num_experts=4, tokens=16, width=4, hidden=4, dtype=dtype, idle_as_none=True
    )
    trace = open_trace(tmp_path / "a.trace")
    for stream in ("gradient", "weight"):
        files = export_tensors(trace, tmp_path / stream, stream=stream)
        assert len(files) == (4 if stream == "gradient" else 2)
        for file in files:
            step = int(file.stem.rsplit("-", 1)[1])
            with safe_open(file, "pt") as stored:
                assert set(stored.keys()) == {n for n in trace.infos if trace.raw(stream, n, step) is not None}
                for name in stored.keys():  # noqa: SIM118
                    tensor, ours = stored.get_tensor(name), trace.tensor(stream, name, step)
                    assert ours is not None
                    assert tensor.dtype == ours.dtype
                    assert tensor.shape == ours.shape
                    assert bytes(tensor.untyped_storage()) == bytes(ours.untyped_storage())


def test_a_sample_of_experts_says_which(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "a.trace", steps=2, num_experts=4, tokens=16, width=4, hidden=4)
    slice_trace(open_trace(tmp_path / "a.trace"), tmp_path / "b.trace", experts=[1, 3])
    trace = open_trace(tmp_path / "b.trace")
    (file,) = export_tensors(trace, tmp_path / "g", steps=[1], params="*up_proj")
    with safe_open(file, "np") as stored:
        (name,) = stored.keys()
        assert json.loads(stored.metadata()["experts"]) == {name: [1, 3]}
        assert np.array_equal(stored.get_tensor(name), trace.raw("gradient", name, 1).data)  # type: ignore[union-attr]
        assert stored.get_tensor(name).shape[0] == 2


# --------------------------------------------------------------------------------------------------- what is no log

SOUND = LINE % (0, "decoder", 0, 0, 1, 2, "", "[[1, 2]]")
BAD_LINES = {
    "broken": ('{"step": 0, "layer"', "line 2: not JSON|no top_indices"),
    "no json": ("hello\n", "line 2: "),
    "a list": ("[1, 2]\n", "line 2: is no JSON object"),
    "no ids": ('{"step": 0, "layer": 0}\n', "line 2: no top_indices"),
    "no layer": ('{"step": 0, "top_indices": [[1]]}\n', "line 2: layer is None"),
    "negative step": ('{"step": -1, "layer": 0, "top_indices": [[1]]}\n', "line 2: step is -1"),
    "huge step": ('{"step": %s, "layer": 0, "top_indices": [[1]]}\n' % ("9" * 400), "line 2: step is 9999"),
    "fraction": ('{"step": 0.5, "layer": 0, "top_indices": [[1]]}\n', "line 2: step is 0.5"),
    "true": ('{"step": true, "layer": 0, "top_indices": [[1]]}\n', "line 2: step is True"),
    "NaN step": ('{"step": NaN, "layer": 0, "top_indices": [[1]]}\n', "line 2: NaN is not JSON"),
    "NaN id": ('{"step": 0, "layer": 0, "top_indices": [[NaN]]}\n', "line 2: top_indices is"),
    "huge id": ('{"step": 0, "layer": 0, "top_indices": [[%s]]}\n' % ("9" * 5000), "line 2: top_indices is"),
    "large id": ('{"step": 0, "layer": 0, "top_indices": [[4294967296]]}\n', "line 2: expert 4294967296 of layer 0"),
    "negative id": ('{"step": 0, "layer": 0, "top_indices": [[-2]]}\n', "line 2: expert -2 of layer 0"),
    "ragged": ('{"step": 0, "layer": 0, "top_indices": [[1, 2], [3]]}\n', "line 2: top_indices is"),
    "ragged, right sum": (
        '{"step": 0, "layer": 0, "top_indices": [[1, 2], [3], [4, 5, 6]]}\n',
        "line 2: top_indices is",
    ),
    "nested": ('{"step": 0, "layer": 0, "top_indices": [[[1]]]}\n', "line 2: top_indices is"),
    "flat": ('{"step": 0, "layer": 0, "top_indices": [1, 2]}\n', "line 2: top_indices is"),
    "twice": ('{"step": 0, "layer": 0, "top_indices": [[1]], "top_indices": [[2]]}\n', "line 2: key 'top_indices'"),
    "wrong topk": ('{"step": 0, "layer": 0, "topk": 3, "top_indices": [[1]]}\n', "line 2: topk says 3"),
    "wrong count": ('{"step": 0, "layer": 0, "num_tokens": 9, "top_indices": [[1]]}\n', "line 2: num_tokens says 9"),
    "odd block": ('{"step": 0, "layer": 0, "block": "\\u001b[31m", "top_indices": [[1]]}\n', "line 2: block is"),
    "deep": (SOUND.replace('"rank"', '"x": ' + "[" * 20000 + "]" * 20000 + ', "rank"'), "line 2: nested"),
    "much beside": ('{"step": 0, "x": "%s", "layer": 0, "top_indices": [[1]]}\n' % ("x" * 70000), "line 2: 70"),
    "not utf-8": (b'{"step": 0, "x": "\xff", "layer": 0, "top_indices": [[1]]}\n', "line 2: byte"),
    "going back": (SOUND.replace('"step": 0', '"step": 5') + SOUND, "line 3: step 0 comes after step 5"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_one_line_with_its_number(tmp_path: Path, name: str) -> None:
    text, says = BAD_LINES[name]
    log = tmp_path / "router_trace_rank0.jsonl"
    log.write_bytes(SOUND.encode() + (text if isinstance(text, bytes) else text.encode()))
    refused(log, tmp_path, f"router_trace_rank0.jsonl {says}")


BAD_CSV = {
    "empty": ("", "line 1: names no column 'layer'"),
    "no expert": ("layer,step\n1,2\n", "line 1: names no column 'expert'"),
    "twice": ("layer,expert,layer_id\n1,2,3\n", "line 1: names the column 'layer' twice"),
    "text": ("layer,expert\n0,1\n0,one\n", "line 3: expert is 'one', not a whole number"),
    "NaN": ("layer,expert\n0,nan\n", "line 2: expert is 'nan'"),
    "fraction": ("layer,expert\n0,1.5\n", "line 2: expert is '1.5'"),
    "huge": (f"layer,expert\n0,{'9' * 4000}\n", "line 2: expert is"),
    "large": ("layer,expert\n0,1\n0,1048576\n", "line 3: expert is 1048576; it must be a whole number from -1"),
    "negative": ("layer,expert\n0,1\n0,-2\n", "line 3: expert is -2"),
    "negative layer": ("layer,expert\n-1,1\n", "line 2: layer is -1"),
    "few columns": ("layer,expert\n0\n", "line 2: has 1 columns, the first line names 2"),
    "many columns": ("layer,expert\n0,1,2\n", "line 2: has 3 columns"),
    "a hole": ("layer,expert\n0,\n", "line 2: expert is ''"),
    "going back": ("step,layer,expert\n5,0,1\n4,0,1\n", "line 3: step 4 comes after step 5"),
    "huge token": ("layer,expert,token\n0,1,4294967296\n", "line 2: token is 4294967296"),
    "only a head": ("layer,expert\n", "holds no activation"),
    "too wide": ("layer,expert,token\n" + "0,1,0\n" * 5000, "line 2: a token of this step has 5000 activations"),
    "open quote": ('layer,expert\n0,"1\n' + "0,1\n" * 3, "line 2: expert is"),
    "bytes": (b"layer,expert\n0,\xff\xfe\n", "line 2: expert is"),
    "zero bytes": (b"layer,expert\n0,\x001\n", "line 2: expert is"),
}


@pytest.mark.parametrize("name", BAD_CSV)
def test_a_bad_csv_is_one_line_with_its_number(tmp_path: Path, name: str) -> None:
    text, says = BAD_CSV[name]
    log = tmp_path / "log.csv"
    log.write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(log, tmp_path, says)


def refused(log: Path, tmp_path: Path, says: str) -> None:
    with pytest.raises(GradreelError, match=says) as error:
        import_routing(log, tmp_path / "out.trace")
    assert "\n" not in str(error.value)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 500
    assert not (tmp_path / "out.trace").exists()


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_a_line_without_end_costs_its_limit_and_no_more(tmp_path: Path, name: str) -> None:
    """10 GB without a line feed, on a sparse file: refused after the limit of a line, within bounded memory."""
    log = tmp_path / name
    log.write_bytes(b"layer,expert\n" if name.endswith("csv") else b"")
    with open(log, "r+b") as file:
        file.truncate(10 << 30)
    tracemalloc.start()
    try:
        with pytest.raises(GradreelError, match=r"line \d: is longer than \d+ bytes"):
            import_routing(log, tmp_path / "out.trace")
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_a_step_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_import, "MAX_STEP_BYTES", 10_000)
    log = tmp_path / "a.csv"
    log.write_text("step,layer,expert\n" + "0,0,1\n" * 1000)
    refused(log, tmp_path, "line 2: step 0 takes more than")
    log = tmp_path / "a.jsonl"
    log.write_text(SOUND * 1000)
    refused(log, tmp_path, r"line \d+: step 0 takes more than")


def test_memory_follows_the_step_and_not_the_file(tmp_path: Path) -> None:
    log = tmp_path / "a.csv"
    log.write_text("step,layer,token,expert\n" + "".join(f"{i // 500},0,{i % 500},{i % 7}\n" for i in range(60_000)))
    tracemalloc.start()
    try:
        trace = open_trace(import_routing(log, tmp_path / "a.trace"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(trace.steps) == 120
    assert peak < 24 << 20


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
RECORDS = st.fixed_dictionaries(
    {},
    optional={
        "step": JSON_VALUES | st.integers(0, 3),
        "layer": JSON_VALUES | st.integers(0, 3),
        "top_indices": JSON_VALUES | st.lists(st.lists(st.integers(-1, 9), min_size=2, max_size=2), max_size=4),
        "block": JSON_VALUES | st.sampled_from(["decoder", "mtp"]),
        "mtp_idx": JSON_VALUES | st.integers(0, 1),
        "topk": JSON_VALUES | st.just(2),
        "stage": JSON_VALUES,
    },
)
PROFILE = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


def try_import(log: Path, content: bytes, out: Path) -> None:
    """Import gives a sound trace or one line; nothing else, whatever is in the file."""
    log.write_bytes(content)
    try:
        place = import_routing(log, out)
    except GradreelError as error:
        assert "\n" not in str(error)  # noqa: PT017
        assert str(error).isprintable()  # noqa: PT017
        return
    trace = open_trace(place)
    assert trace.verify() == []
    trace.routing().collect()
    assert trace.steps


@PROFILE
@given(st.lists(RECORDS.map(json.dumps) | st.text(max_size=20), max_size=6))
def test_any_lines_are_a_trace_or_an_error(tmp_path_factory: pytest.TempPathFactory, rows: list[str]) -> None:
    folder = tmp_path_factory.mktemp("lines")
    try_import(folder / "a.jsonl", "\n".join(rows).encode("utf-8", "surrogatepass"), folder / "out.trace")


CELLS = st.integers(-2, 9).map(str) | st.text(alphabet='0123456789-,."e \r\n\x00é', max_size=6) | st.integers().map(str)


@PROFILE
@given(
    st.lists(st.sampled_from(["layer", "expert", "step", "token", "other", ""]), max_size=5),
    st.lists(st.lists(CELLS, max_size=5), max_size=8),
)
def test_any_cells_are_a_trace_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, head: list[str], rows: list[list[str]]
) -> None:
    folder = tmp_path_factory.mktemp("cells")
    text = "\n".join([",".join(head), *(",".join(row) for row in rows)])
    try_import(folder / "a.csv", text.encode(), folder / "out.trace")


@PROFILE
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 4), st.integers(-1, 6)), min_size=1, max_size=40
    )
)
def test_what_is_imported_is_what_a_loop_counts(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, int, int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("counts")
    rows = sorted(rows, key=lambda row: row[0])
    text = "step,layer,token,expert\n" + "".join(f"{s},{layer},{t},{e}\n" for s, layer, t, e in rows)
    (folder / "a.csv").write_text(text)
    trace = open_trace(import_routing(folder / "a.csv", folder / "a.trace", num_experts=8))
    for step in {row[0] for row in rows}:
        for layer in {row[1] for row in rows if row[0] == step}:
            counts = [0] * 8
            for s, at, _, expert in rows:
                if (s, at) == (step, layer) and expert >= 0:
                    counts[expert] += 1
            routing = trace.routing_step(step, layer)
            assert routing is not None
            assert routing.tokens_per_expert.tolist() == counts
            assert len(routing.topk_expert_ids) == len({t for s, at, t, _ in rows if (s, at) == (step, layer)})
