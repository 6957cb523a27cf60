"""Options of the whole command: version, plug-ins, and packages of other people that are called like ours."""

import subprocess
import sys
from pathlib import Path

import pytest

from ablations.cli import plugins_first
from traces import open_trace

ROOT = Path(__file__).resolve().parents[2]


def gradreel(*arguments: str, before: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own; `before` is searched for packages before ours."""
    code = (
        f"import sys; sys.path[:0] = {[str(before)] if before else []} + [{str(ROOT)!r}]\n"
        "import importlib.util as u\n"
        f"spec = u.spec_from_file_location('ablations', {str(ROOT / 'ablations' / '__init__.py')!r}, "
        f"submodule_search_locations=[{str(ROOT / 'ablations')!r}])\n"
        "sys.modules['ablations'] = u.module_from_spec(spec)\n"
        "from ablations.cli import main; main()\n"
    )
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["info", "x"], ["info", "x"]),
        (["info", "x", "--plugin", "p.py"], ["--plugin", "p.py", "info", "x"]),
        (["--plugin=a.py", "info", "--plugin", "b.py"], ["--plugin=a.py", "--plugin", "b.py", "info"]),
        (["record", "o", "--", "python", "--plugin", "p"], ["record", "o", "--", "python", "--plugin", "p"]),
        (["info", "--plugin"], ["--plugin", "info"]),
    ],
)
def test_a_plugin_may_stand_anywhere_before_the_users_program(given: list[str], expected: list[str]) -> None:
    assert plugins_first(given) == expected


def test_version_names_a_foreign_distribution_by_path(tmp_path: Path) -> None:
    assert gradreel("--version").stdout.splitlines() == ["gradreel 0.1.0"]
    info = tmp_path / "traces-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: traces\nVersion: 9.9\n")
    (info / "top_level.txt").write_text("traces\n")
    (info / "RECORD").write_text("traces/other.py,,\n")
    done = gradreel("--version", before=tmp_path)
    assert done.returncode == 0, done.stderr
    first, warning = done.stdout.splitlines()
    assert first == "gradreel 0.1.0"
    assert "traces 9.9" in warning
    assert str(tmp_path / "traces") in warning


def test_a_foreign_package_in_our_place_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "__init__.py").write_text("")
    done = gradreel("--help", before=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert str(tmp_path / "traces") in line
    assert "uninstall" in line


def modules_loaded_by(*arguments: str) -> list[str]:
    """The heavy packages that one call of the command imports."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from ablations.cli import main\n"
        f"try: main({list(arguments)!r})\n"
        "except SystemExit as end: assert not end.code\n"
        "print(*[m for m in ('torch', 'seaborn', 'matplotlib', 'numba') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stderr.split()


def test_help_loads_neither_torch_nor_plotting_and_shows_every_verb() -> None:
    assert modules_loaded_by("--help") == []
    assert modules_loaded_by("list", "metrics") == []
    done = gradreel("--help")
    for verb in ("demo", "record", "info", "verify", "recover", "replay", "compare", "report", "list", "bench"):
        assert f" {verb} " in done.stdout, verb


def test_a_plugin_file_is_loaded(tmp_path: Path) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from dataclasses import replace\n"
        "from ablations.presets import PRESETS\n"
        "ABLATION = replace(PRESETS.get('demo'), name='mine')\n"
    )
    done = gradreel("list", "presets", "--plugin", str(plugin))
    assert done.returncode == 0, done.stderr
    assert "mine" in done.stdout
    missing = gradreel("--plugin", "nowhere.py", "list", "presets")
    assert missing.returncode == 2
    assert len(missing.stderr.splitlines()) == 1
    assert "nowhere.py" in missing.stderr


def test_record_trains_and_records_a_preset(tmp_path: Path) -> None:
    folder = tmp_path / "short.trace"
    done = gradreel("record", "--preset", "demo", "--steps", "3", "--every", "2", str(folder))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"Trace: {folder}\n"
    trace = open_trace(folder)
    assert trace.steps == [1, 3]
    assert trace.scalars()["loss"].drop_nulls().len() == 3
    heavy = modules_loaded_by("info", str(folder))
    assert heavy == []
    again = gradreel("record", "--preset", "demo", str(folder))
    assert again.returncode == 2
    assert "already holds a trace" in again.stderr


@pytest.mark.parametrize(
    "wrong",
    [
        ["nonsense"],
        ["demo", "--steps", "1"],
        ["record"],
        ["record", "out.trace"],
        ["record", "--preset", "demo", "out.trace", "--", "python", "train.py"],
        ["record", "--preset", "nonsense", "out.trace"],
        ["record", "out.trace", "--", "python", "nowhere.py"],
        ["record", "out.trace", "--steps", "3", "--", "python", "train.py"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_one_line_and_exit_code_2(wrong: list[str]) -> None:
    done = gradreel(*wrong)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr
