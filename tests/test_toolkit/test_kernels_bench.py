"""The benchmark frame: checks come first, rows are complete, bad arguments are one line."""

import json

import pytest

from toolkit.kernels import _bench, _bench_cases
from traces.errors import GradreelError


@pytest.mark.parametrize("op", _bench.OPS)
def test_every_op_is_checked_and_timed(op, tmp_path):
    lines = []
    path = tmp_path / "bench.json"
    assert _bench.run(op, "cpu", path, rounds=2, small=True, echo=lines.append) == 0
    report = json.loads(path.read_text())
    assert report["failures"] == []
    assert {"python", "torch", "numpy", "numba"} <= set(report["machine"]["versions"])
    assert len(lines) > len({row["rival"] for row in report["rows"]}) > 0
    assert max(map(len, lines)) <= 80
    for row in report["rows"]:
        assert row["op"] == op
        assert 0 < row["ours_ms_p20"] <= row["ours_ms_p50"] <= row["ours_ms_p80"]
        assert row["share_of_copy_bandwidth"] > 0
        if row["rival"]:
            assert 0 < row["ratio_p20"] <= row["ratio_p50"] <= row["ratio_p80"]


def test_ops_cases_and_checks_name_the_same():
    assert set(_bench.OPS) == set(_bench_cases.CASES) == set(_bench_cases.CHECKS)


def test_an_op_whose_check_fails_gets_no_time(monkeypatch, tmp_path):
    monkeypatch.setitem(_bench_cases.CHECKS, "sr_sinkhorn", lambda device: iter(["cpu is wrong"]))
    monkeypatch.setitem(_bench_cases.CASES, "sr_sinkhorn", lambda *a: pytest.fail("timed"))
    lines = []
    assert _bench.run("sr_sinkhorn", "cpu", tmp_path / "bench.json", echo=lines.append) == 1
    assert lines == ["sr_sinkhorn: cpu is wrong", "sr_sinkhorn: not timed, since its check failed"]
    assert json.loads((tmp_path / "bench.json").read_text())["rows"] == []


def test_the_check_sees_a_wrong_kernel(monkeypatch):
    from toolkit.kernels import sr_sinkhorn_cpu

    right = sr_sinkhorn_cpu.run

    def wrong(x, *arguments):
        result = right(x, *arguments)
        for direction in result.directions.values():
            direction.mul_(1.00001)
        return result

    monkeypatch.setattr(sr_sinkhorn_cpu, "run", wrong)
    assert any(line.startswith("cpu on scale 1") for line in _bench.check("sr_sinkhorn"))


def test_a_peer_file_is_timed(tmp_path):
    peer = tmp_path / "peer.py"
    peer.write_text("def sr_sinkhorn(weight, gradient, lr):\n    weight.sub_(gradient.sign(), alpha=lr)\n")
    path = tmp_path / "bench.json"
    _bench.run("sr_sinkhorn", "cpu", path, peer, rounds=1, small=True, echo=lambda line: None)
    assert "peer" in {row["rival"] for row in json.loads(path.read_text())["rows"]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"op": "sinkhorn"}, "unknown op 'sinkhorn'.*sr_sinkhorn"),
        ({"device": "tpu"}, "allowed: cpu, cuda"),
        ({"peer": "missing.py"}, "does not exist"),
    ],
)
def test_bad_arguments_are_one_clear_line(arguments, message):
    with pytest.raises(GradreelError, match=message):
        _bench.run(**arguments)
