"""`gradreel new`: what it writes works at once, passes the contracts of its kind, and is as clean as our own files."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ablations.cli import build_app
from ablations.presets import PRESETS
from toolkit.cli_new import TEMPLATES, write_plugin
from toolkit.metrics import METRICS
from toolkit.plots import PLOTS
from toolkit.recipes import RECIPES
from toolkit.stages import STAGES
from toolkit.variants import VARIANTS
from traces.console import run
from traces.errors import GradreelError
from traces.registry import Registry, load_plugin_file
from traces.synthetic import write_synthetic

ROOT = Path(__file__).parent.parent.parent
REGISTRIES: dict[str, Registry[Any]] = {
    "metric": METRICS,
    "plot": PLOTS,
    "preset": PRESETS,
    "recipe": RECIPES,
    "stage": STAGES,
    "variant": VARIANTS,
}


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Any]:
    """Write and load a plug-in; it is forgotten afterwards."""
    added: list[tuple[str, str]] = []

    def write_and_load(kind: str, name: str) -> Path:
        file = write_plugin(kind, name, tmp_path)
        added.append((kind, name))
        assert load_plugin_file(file) == [name]
        return file

    yield write_and_load
    for kind, name in added:
        REGISTRIES[kind]._added.pop(name, None)


def contract(kind: str) -> ModuleType:
    """The contract tests of a kind, as a module to call."""
    path = ROOT / "tests" / "contracts" / f"test_{kind}_contract.py"
    spec = importlib.util.spec_from_file_location(f"contract_of_{kind}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_kind_has_a_template() -> None:
    assert set(TEMPLATES) == set(REGISTRIES)


@pytest.mark.parametrize("name", ["x", "the_longest_name_there_can_be0"])
def test_what_is_written_is_clean(tmp_path: Path, name: str) -> None:
    for kind in TEMPLATES:
        write_plugin(kind, name, tmp_path / kind)
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--config", str(ROOT / "pyproject.toml"), str(tmp_path)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout


def test_a_new_metric_holds_its_contract(load: Any) -> None:
    load("metric", "mine")
    metric, tests = METRICS.get("mine"), contract("metrics")
    tests.test_describes_itself(metric)
    tests.test_an_empty_stream_gives_nothing_but_undefined_values(metric)
    tests.test_measures_are_well_formed(metric)
    tests.test_state_is_bounded(metric)
    for dtype in (tests.torch.float32, tests.torch.float64):
        tests.test_kept_tensors_are_copies(metric, dtype)
    tests.test_the_input_is_left_alone(metric)
    tests.test_a_broken_expert_touches_no_other("mine")


def test_a_new_stage_and_recipe_hold_their_contracts(load: Any) -> None:
    for kind in ("stage", "recipe"):
        load(kind, f"my_{kind}")
    tests = contract("recipes")
    tests.test_stage_declares_its_slots("my_stage")
    tests.test_recipe_on_every_shape("my_recipe", "bfloat16")
    tests.test_recipe_describes_itself("my_recipe")
    tests.test_what_no_recipe_can_step("my_recipe", "int64")
    tests.test_sparse_gradients_are_refused("my_recipe")
    tests.test_lr_zero_leaves_the_weight("my_recipe")
    tests.test_declared_temporaries_are_those_measured("my_recipe")


def test_a_new_variant_changes_the_experts_rate(load: Any) -> None:
    from toolkit.variants import recipe
    from traces.views import ParamInfo

    load("variant", "my_variant")
    info = ParamInfo("w", "routed_expert", (3, 6, 5), expert_axis=0, num_experts=3, matrix_axes=(1, 2))
    assert recipe("mesh+my_variant").chain_for(info).lr_scale == 0.5 * recipe("mesh").chain_for(info).lr_scale
    with pytest.raises(GradreelError, match="its factor is 1"):
        recipe("mesh+my_variant(1.0)")


def test_a_new_plot_holds_its_contract(load: Any) -> None:
    load("plot", "my_plot")
    tests = contract("plots")
    for title in ("plain", "nothing defined", "hostile names"):
        tests.test_it_draws_every_frame("my_plot", (title, tests.FRAMES[title]()))
    tests.test_every_axis_has_its_unit("my_plot")
    tests.test_it_says_what_it_shows("my_plot")


@pytest.mark.full
def test_every_contract_holds_at_length(load: Any) -> None:
    for kind in ("recipe", "variant", "plot"):
        load(kind, f"my_{kind}")
    recipes, plots = contract("recipes"), contract("plots")
    recipes.test_variant_changes_a_recipe_or_raises("my_variant")
    for dtype in recipes.DTYPES:
        recipes.test_recipe_on_every_shape("my_recipe", dtype)
    for title, make in plots.FRAMES.items():
        plots.test_it_draws_every_frame("my_plot", (title, make()))
    plots.test_nothing_is_cut_off("my_plot")
    plots.test_a_missing_metric_is_named("my_plot")


def test_a_new_preset_is_an_experiment(load: Any) -> None:
    from toolkit.variants import recipe

    load("preset", "my_preset")
    preset = PRESETS.get("my_preset")
    size = preset.size("cpu")
    for arm in preset.arms:
        recipe(preset.expression(arm, size))


def test_the_verb_writes_and_the_file_works_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    write_synthetic("a.trace", steps=3, num_experts=4, tokens=32, width=4, hidden=4)
    try:
        assert run(build_app(), ["new", "metric", "row_share"]) == 0
        assert "gradreel replay TRACE -m row_share --plugin row_share.py" in capsys.readouterr().out
        words = ["replay", "a.trace", "-r", "sgd", "-m", "row_share", "--plugin", "row_share.py"]
        assert run(build_app(), words) == 0
        assert run(build_app(), ["new", "metric", "row_share"]) == 2
    finally:
        METRICS._added.pop("row_share", None)
    assert run(build_app(), ["new", "metric", "row_share"]) == 2
    assert "is there already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "name", "says"),
    [
        ("stages", "x", "did you mean 'stage'"),
        ("metric", "max_vio", "exists already"),
        ("metric", "Mine", "no name of a plug-in"),
        ("metric", "../x", "no name of a plug-in"),
        ("metric", "_x", "no name of a plug-in"),
        ("metric", "class", "no name of a plug-in"),
        ("metric", "x" * 31, "at most 30"),
    ],
)
def test_what_cannot_be_written_is_told(tmp_path: Path, kind: str, name: str, says: str) -> None:
    with pytest.raises(GradreelError, match=says) as error:
        write_plugin(kind, name, tmp_path)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []
