"""The verbs info, verify and recover, as a user types them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import typer

from traces.cli import register
from traces.console import run
from traces.synthetic import write_synthetic

VERBS = ("info", "verify", "recover")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "demo.trace"
    write_synthetic(path, steps=20, layers=2)
    return path


def gradreel(*arguments: str | Path) -> tuple[int, str, str]:
    app = typer.Typer()
    register(app)
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = run(app, [str(a) for a in arguments])
    return code, out.getvalue(), err.getvalue()


def test_info_shows_what_is_there(sound: Path) -> None:
    code, out, _ = gradreel("info", sound)
    assert code == 0
    for text in (
        "synthetic",
        "20 of 20 seen: 1 to 20",
        "finished",
        "gradient",
        "routing",
        "weight",
        "routed_expert",
        "18,432",
    ):
        assert text in out
    assert max(map(len, out.splitlines())) <= 80


def test_info_imports_neither_torch_nor_polars(sound: Path) -> None:
    program = (
        "import sys, typer; from traces.cli import register; app = typer.Typer(); register(app)\n"
        "app(['info', sys.argv[1]], standalone_mode=False); print({'torch', 'polars', 'seaborn'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", program, str(sound)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_verify_and_recover_a_sound_trace(sound: Path) -> None:
    assert gradreel("verify", sound)[:2] == (0, "demo.trace is sound: every byte agrees with its seal\n")
    code, out, _ = gradreel("recover", sound)
    assert code == 0
    assert "finished already" in out


def test_verify_names_file_and_steps(sound: Path, tmp_path: Path) -> None:
    broken = tmp_path / "b.trace"
    shutil.copytree(sound, broken)
    chunk = broken / "rank-00000" / "chunk-000001.safetensors"
    data = bytearray(chunk.read_bytes())
    data[-5] ^= 4
    chunk.write_bytes(data)
    code, out, _ = gradreel("verify", broken)
    assert code == 1
    assert "chunk-000001.safetensors (steps 9 to 16) is damaged" in out
    assert "1 damaged place in b.trace" in out


def test_an_unfinished_trace_is_recovered(sound: Path, tmp_path: Path) -> None:
    cut = tmp_path / "c.trace"
    shutil.copytree(sound, cut)
    (cut / "rank-00000" / "end.json").unlink()
    (cut / "rank-00000" / "seal-000002.json").unlink()
    (cut / "rank-00000" / ".chunk-000003.safetensors.tmp").write_bytes(b"half")
    before = {f.name: f.read_bytes() for f in (cut / "rank-00000").iterdir()}
    assert "unfinished, run: gradreel recover" in " ".join(gradreel("info", cut)[1].split())
    code, out, _ = gradreel("verify", cut)
    assert code == 0
    assert "16 steps are sealed" in out
    code, out, _ = gradreel("recover", cut)
    assert code == 0
    assert "16 steps (1 to 16) readable" in out
    after = {f.name: f.read_bytes() for f in (cut / "rank-00000").rglob("*") if f.is_file()}
    assert {k: v for k, v in after.items() if k != "end.json"} == before  # moved, never deleted or changed
    aside = {f.name for f in (cut / "rank-00000" / "unsealed").iterdir()}
    assert aside == {"chunk-000002.safetensors", "routing-000002.parquet", ".chunk-000003.safetensors.tmp"}
    assert gradreel("verify", cut)[:2] == (0, "c.trace is sound: every byte agrees with its seal\n")


@pytest.mark.parametrize("verb", VERBS)
def test_no_trace_is_one_line_and_exit_code_2(verb: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path, says in [
        (tmp_path, "is no trace: it holds no header.json"),
        (tmp_path / "gone", "does not exist"),
        (tmp_path / "file", "is a file, not a trace"),
    ]:
        code, out, err = gradreel(verb, path)
        assert (code, out) == (2, "")
        assert says in err
        assert "give the path of a trace folder" in err
        assert err.count("\n") == 1


@pytest.mark.parametrize("verb", VERBS)
def test_help_is_a_sentence_and_an_example(verb: str) -> None:
    code, out, _ = gradreel(verb, "--help")
    assert code == 0
    assert f"Example: gradreel {verb} demo.trace" in out
    assert max(map(len, out.splitlines())) <= 80


def test_a_trace_whose_writer_was_killed_at_once(sound: Path, tmp_path: Path) -> None:
    (tmp_path / "a.trace" / "rank-00000").mkdir(parents=True)
    shutil.copy(sound / "header.json", tmp_path / "a.trace")
    for verb, expected in (("info", 2), ("recover", 2), ("verify", 1)):
        code, out, err = gradreel(verb, tmp_path / "a.trace")
        assert code == expected
        assert "holds nothing yet" in out + err
