"""The house holds: imports go down only, plug-in folders are complete, light commands stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("traces", "toolkit", "ablations")

#: Longest matching prefix wins.
FLOORS = {
    "traces": 0,
    "traces.cli": 10,
    "traces.cli_files": 10,
    "traces.cli_record": 10,
    "toolkit.frame": 1,
    "toolkit.kernels": 2,
    "toolkit.stages": 3,
    "toolkit.recipes": 4,
    "toolkit.variants": 5,
    "toolkit.optim": 6,
    "toolkit.metrics": 6,
    "toolkit.memory": 6,
    "toolkit.replay": 7,
    "toolkit.plots": 8,
    "toolkit.report": 8,
    "toolkit.frame_export": 8,
    "toolkit.view.page": 8,
    "toolkit.view": 9,
    "toolkit.cli": 10,
    "toolkit.cli_new": 10,
    "toolkit.cli_plan": 10,
    "toolkit.cli_view": 10,
    "ablations": 9,
    "ablations.cli": 10,
    "ablations.cli_simulate": 10,
    "ablations.cli_study": 10,
}
#: Rooms of one floor that must not know each other.
BLIND = {"toolkit.optim", "toolkit.metrics", "toolkit.memory"}
#: What is drawn sees only the one table.
FRAME_ONLY = {"toolkit.plots", "toolkit.report", "toolkit.view.page", "toolkit.frame_export"}
#: Package doors that hand out names lazily.
DOORS = {"traces", "toolkit", "ablations"}


def room_of(module: str) -> str | None:
    matches = [prefix for prefix in FLOORS if module == prefix or module.startswith(prefix + ".")]
    return max(matches, key=len) if matches else None


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> set[str]:
    """Every module of ours that `path` imports, also inside functions and under TYPE_CHECKING."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            folder = ROOT / (node.module or "").replace(".", "/")
            for alias in node.names:
                is_module = (folder / f"{alias.name}.py").exists() or (folder / alias.name / "__init__.py").exists()
                found.add(f"{node.module}.{alias.name}" if is_module else node.module or "")
    return {name for name in found if name.split(".")[0] in PACKAGES}


def sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def violations(module: str, imported: set[str]) -> list[str]:
    own = room_of(module)
    if module in DOORS:
        return []
    if own is None:
        return [f"{module} stands on no floor; add it to FLOORS"]
    wrong = []
    for target in imported:
        room = room_of(target)
        if target in DOORS:
            # The flat public names of a package are for the packages above it.
            if PACKAGES.index(target) >= PACKAGES.index(module.split(".")[0]) and FLOORS[own] < 9:
                wrong.append(f"{module} imports {target}, the door of its own house")
        elif room is None:
            wrong.append(f"{module} imports {target}, which stands on no floor")
        elif FLOORS[room] > FLOORS[own]:
            wrong.append(f"{module} (floor {FLOORS[own]}) imports {target} (floor {FLOORS[room]})")
        elif own in BLIND and room in BLIND and own != room:
            wrong.append(f"{module} imports its neighbour {target}")
        elif own in FRAME_ONLY and room not in {*FRAME_ONLY, "toolkit.frame", "traces"}:
            wrong.append(f"{module} draws, but imports {target}")
    return wrong


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down_only(path: Path) -> None:
    assert violations(module_name(path), imports_of(path)) == []


def test_the_floor_check_sees_an_upward_import() -> None:
    assert violations("traces.reader", {"toolkit.frame"})
    assert violations("toolkit.metrics.grad_norm", {"toolkit.memory"})
    assert violations("toolkit.plots.memory_bars", {"toolkit.replay"})
    assert not violations("toolkit.replay._engine", {"toolkit.recipes", "traces.reader"})


@pytest.mark.parametrize(
    "folder",
    [
        "traces/families",
        "toolkit/stages",
        "toolkit/recipes",
        "toolkit/variants",
        "toolkit/metrics",
        "toolkit/plots",
        "ablations/presets",
        "ablations/simulate/presets",
    ],
)
def test_every_public_file_of_a_plugin_folder_defines_its_constant(folder: str) -> None:
    package = folder.replace("/", ".")
    code = (
        f"import {package} as p; from traces.registry import _REGISTRIES as r;"
        f"reg = next(x for x in r.values() if x.package == {package!r}); print(len(reg.all()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    public = [p for p in (ROOT / folder).glob("*.py") if not p.name.startswith("_")]
    assert int(done.stdout) == len(public) > 0


def test_files_can_be_read_in_one_sitting() -> None:
    long = {str(p.relative_to(ROOT)): n for p in sources() if (n := len(p.read_text().splitlines())) > 500}
    assert long == {}


@pytest.mark.parametrize(
    "module", ["traces", "toolkit", "ablations", "ablations.cli", "traces.reader", "traces.verify"]
)
def test_light_modules_load_neither_torch_nor_plotting(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('torch', 'seaborn', 'matplotlib', 'numba') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
