"""Runs are made once, survive being killed, start equal, and fail one by one."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from ablations.executors import EXECUTORS, Executor, Job, Outcome
from ablations.presets import Arm, Data
from ablations.runner._execute import execute
from ablations.runner._plan import Cell, Plan
from ablations.runner._run import make_runs
from ablations.runner._spec import RunSpec, run_spec
from ablations.runner._store import finished, locked, read_run_frame
from ablations.runner.worker import make
from traces.errors import GradreelError

_FILE = Path(__file__).with_name("tiny_experiment.py")
_SPEC = importlib.util.spec_from_file_location("tiny_experiment", _FILE)
assert _SPEC is not None
assert _SPEC.loader is not None
tiny = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(tiny)
TINY, SIZE, PRESET, run = tiny.TINY, tiny.SIZE, tiny.PRESET, tiny.run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, pl.DataFrame]:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("whole")
    return root, run(PRESET, out=root, executor="here").frame


def test_every_way_has_every_arm_and_seed(whole: tuple[Path, pl.DataFrame]) -> None:
    root, frame = whole
    for way in ("shared", "tuned", "matched"):
        rows = frame.filter(pl.col("metric") == f"in_{way}")
        assert sorted(rows.select("arm", "seed").unique().rows()) == [
            (arm, seed) for arm in ("adamw", "mesh", "sinkgd") for seed in (0, 1)
        ]
    assert frame.filter(pl.col("metric") == "in_grid").height == 3 * 2
    assert (root / "frame.parquet").is_file()
    provenance = json.loads((root / "provenance.json").read_text())
    assert provenance["failed"] == {}
    assert {v["way"] for v in provenance["verdicts"]} == {"shared", "tuned", "matched"}
    assert len(list(root.glob("[!.]*/run.json"))) == provenance["runs"] <= Plan(PRESET, SIZE).most_runs()


def test_a_finished_experiment_makes_no_run_again(
    whole: tuple[Path, pl.DataFrame], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, frame = whole

    def nothing(*_: object, **__: object) -> Iterator[Outcome]:
        raise AssertionError("a run was made again")

    monkeypatch.setitem(EXECUTORS._added, "here", Executor("here", "", nothing))
    assert run(PRESET, out=root, executor="here").frame.equals(frame)


def test_all_arms_of_a_seed_begin_equal_and_seeds_differ(whole: tuple[Path, pl.DataFrame]) -> None:
    runs = [json.loads(file.read_text()) for file in whole[0].glob("[!.]*/run.json")]
    for name in ("weights_sha256", "batches_sha256"):
        by_seed = {seed: {r[name] for r in runs if r["spec"]["seed"] == seed} for seed in (0, 1)}
        assert [len(values) for values in by_seed.values()] == [1, 1]
        assert by_seed[0] != by_seed[1]


def test_matched_runs_move_as_far_as_the_baseline_at_every_step(whole: tuple[Path, pl.DataFrame]) -> None:
    frame = whole[1].filter(pl.col("metric").is_in(["in_matched", "in_tuned"]))
    baseline = frame.filter((pl.col("arm") == "sinkgd") & (pl.col("metric") == "in_tuned") & (pl.col("seed") == 1))
    arm = frame.filter((pl.col("arm") == "mesh") & (pl.col("metric") == "in_matched") & (pl.col("seed") == 1))
    sizes = [
        read_run_frame(whole[0], rows["run"][0]).filter(pl.col("metric") == "delta_rms").sort("param", "step")
        for rows in (baseline, arm)
    ]
    assert sizes[0].height == 6 * 2
    np.testing.assert_allclose(sizes[1]["value"], sizes[0]["value"], rtol=1e-6)
    assert sizes[0]["value"].min() > 0


def test_matching_scales_the_real_change_of_the_weights() -> None:
    from ablations.models import build_model
    from ablations.runner._execute import Moves

    torch.manual_seed(0)
    model, _ = build_model(TINY)
    weights = dict(model.named_parameters())
    names = [name for name in weights if "experts" in name]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    moves = Moves(model, optimizer, {name: [0.25] for name in names})
    before = {name: weights[name].detach().clone() for name in weights}
    for step in range(2):  # the second step is past the end of the targets
        for parameter in weights.values():
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
        start = {name: weights[name].detach().clone() for name in weights}
        optimizer.step()
        for name in weights:
            delta = (weights[name].detach() - start[name]).double()
            want = -0.5 * weights[name].grad.double()
            if name in names and step == 0:
                want = want * 0.25 / want.square().mean().sqrt()
            np.testing.assert_allclose(delta, want, atol=1e-6)
    rows = {(row["param"], row["step"]): row["value"] for row in moves.rows()}
    assert {key[0] for key in rows} == set(names)
    for name in names:
        assert rows[name, 1] == 0.25
        moved = (weights[name].detach() - before[name]).double()
        assert moved.square().mean().sqrt() > 0.25
    with pytest.raises(GradreelError, match="other parameters"):
        Moves(model, optimizer, {"nothing": [1.0]})


def test_the_frame_is_the_same_after_kill_and_resume(whole: tuple[Path, pl.DataFrame], tmp_path: Path) -> None:
    """The whole program is killed with -9 while local workers are at work; nothing finished is lost."""
    root = tmp_path / "killed"
    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('tiny_experiment', {str(_FILE)!r})\n"
        "tiny = importlib.util.module_from_spec(spec); spec.loader.exec_module(tiny)\n"
        f"tiny.run(tiny.PRESET, out={str(root)!r}, executor='local', workers=1)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).resolve().parents[2])
    deadline = time.monotonic() + 120
    while len(list(root.glob("[!.]*/run.json"))) < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = {file.parent.name: file.stat().st_mtime_ns for file in root.glob("[!.]*/run.json")}
    assert 2 <= len(kept) < len(list(whole[0].glob("[!.]*/run.json")))
    # The worker finds out that nobody listens; until then it may still finish its run.
    resumed = run(PRESET, out=root, executor="here").frame
    assert resumed.equals(whole[1])
    assert all((root / name / "run.json").stat().st_mtime_ns == at for name, at in kept.items())
    assert not list(root.glob(".making-*"))


def test_local_workers_die_and_the_rest_goes_on(tmp_path: Path) -> None:
    """One run kills its worker, one meets missing data, one loses its loss, two are well."""
    plugin = tmp_path / "deadly.py"
    plugin.write_text(
        "import os, signal\n"
        "from dataclasses import replace\n"
        "from toolkit.recipes import RECIPES, RecipeFamily\n"
        "def build(options):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "RECIPE = replace(RECIPES.get('sgd'), name='deadly', build=build)\n"
    )
    from ablations.executors.local import run as run_locally

    good = run_spec(SIZE, "sgd", 1e-3, 0)
    specs = [
        run_spec(SIZE, "deadly", 1e-3, 0),
        good,
        run_spec(replace(SIZE, data=Data("nowhere")), "sgd", 1e-3, 0),
        run_spec(replace(SIZE, clip=None), "sgd", 1e30, 0),
        run_spec(SIZE, "sgd", 1e-3, 1),
    ]
    jobs = [Job(spec.id, spec.to_dict(), str(tmp_path), (str(plugin),)) for spec in specs]
    steps: list[tuple[str, int]] = []
    outcomes = {o.id: o.error for o in run_locally(jobs, workers=1, on_steps=lambda i, n: steps.append((i, n)))}
    errors = [outcomes[spec.id] for spec in specs]
    assert errors[0] is not None
    assert "worker died (signal SIGKILL)" in errors[0]
    assert errors[1] is errors[3] is errors[4] is None
    assert errors[2] is not None
    assert "unknown data source 'nowhere'" in errors[2]
    lost = finished(tmp_path, specs[3].id)
    assert lost is not None
    assert lost.final_loss is None
    assert lost.diverged_at == 2
    row = read_run_frame(tmp_path, specs[3].id).filter(pl.col("metric") == "valid_loss")
    assert row.select("step", "value", "flag").rows() == [(2, None, "diverged")]
    well = finished(tmp_path, good.id)
    assert well is not None
    assert well.final_loss is not None


def test_a_failed_run_is_a_row_and_a_diverged_one_too(tmp_path: Path) -> None:
    preset = replace(
        PRESET,
        arms={"sinkgd": Arm("sinkgd"), "broken": Arm("sinkgd+no_such_variant"), "wild": Arm("sgd")},
        sizes={"cpu": replace(SIZE, clip=None, shared_lr=3e-3, grids={"wild": (1e25, 1e30)}, seeds=(0,))},
    )
    results = run(preset, out=tmp_path, executor="here")
    rows = results.frame.filter(pl.col("metric") == "valid_loss")
    assert set(rows.filter(pl.col("arm") == "broken")["flag"].to_list()) == {"failed"}
    assert "diverged" in rows.filter(pl.col("arm") == "wild")["flag"].to_list()
    assert results.failed is not None
    assert all("no_such_variant" in why for why in results.failed.values())
    assert any("wild trained at none of its rates" in note for note in results.notes)
    shown = {(v.way, v.paired.arm): v.paired for v in results.verdicts}
    assert shown["shared", "wild"].verdict == "not decided"
    assert ("tuned", "broken") not in shown


def test_a_full_disk_is_one_line_and_no_half_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = run_spec(SIZE, "sgd", 1e-3, 0)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with open(os.devnull, "w") as nowhere:
        error = make({"spec": spec.to_dict(), "root": str(tmp_path), "plugins": []}, nowhere, set())
    assert error == "No space left on device"
    assert [p.name for p in tmp_path.iterdir()] == []


def test_missing_data_for_every_run_is_one_error(tmp_path: Path) -> None:
    preset = replace(PRESET, sizes={"cpu": replace(SIZE, data=Data("nowhere"))})
    with pytest.raises(GradreelError, match="no run of tiny at size cpu could be made: unknown data source 'nowhere'"):
        run(preset, out=tmp_path, executor="here")


def test_other_weights_or_batches_are_an_error(tmp_path: Path, whole: tuple[Path, pl.DataFrame]) -> None:
    import shutil

    root = tmp_path / "copy"
    shutil.copytree(whole[0], root)
    plan = Plan(PRESET, SIZE)
    plan.first()
    spec = plan.cells[Cell("shared", "", "mesh", 1)][0]
    file = root / spec.id / "run.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps({**values, "weights_sha256": "0" * 64}))
    with pytest.raises(GradreelError, match="different initial weights"):
        make_runs(PRESET, SIZE, root, executor="here")
    file.write_text(json.dumps({**values, "batches_sha256": "0" * 64}))
    with pytest.raises(GradreelError, match="different batches"):
        make_runs(PRESET, SIZE, root, executor="here")
    file.write_text("{")
    with pytest.raises(GradreelError, match="damaged"):
        make_runs(PRESET, SIZE, root, executor="here")


def test_an_interrupt_keeps_what_is_finished_and_the_same_call_goes_on(
    whole: tuple[Path, pl.DataFrame],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(jobs: list[Job], **options: object) -> Iterator[Outcome]:
        for number, outcome in enumerate(tiny.here(jobs, **options)):
            yield outcome
            if number == 1:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setitem(EXECUTORS._added, "here", Executor("here", "", interrupted))
        with pytest.raises(KeyboardInterrupt):
            run(PRESET, out=tmp_path, executor="here")
    assert "interrupted; 2 finished runs are kept" in " ".join(capsys.readouterr().err.split())
    assert run(PRESET, out=tmp_path, executor="here").frame.equals(whole[1])


@pytest.mark.full
def test_a_model_of_transformers_runs_too(tmp_path: Path) -> None:
    from ablations.presets._ablation import changed
    from ablations.presets._sizes import on_gpu

    layers = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"], "mlp_layer_types": ["moe"]}
    small = {
        "hidden_size": 32,
        "moe_intermediate_size": 16,
        "q_lora_rank": 16,
        "o_lora_rank": 8,
        "hc_mult": 2,
        **layers,
    }
    changes = {"model.config": small, "device": "cpu", "steps": 3, "warmup": 1, "batch": 2, "length": 16}
    size = changed(on_gpu(eval_batches=4, eval_batch=2), changes)
    first = execute(run_spec(size, "mesh+adam_rest(1e-3)", 1e-3, 0), tmp_path)
    assert first.final_loss is not None
    assert 5 < first.final_loss < 6.5
    frame = read_run_frame(tmp_path, first.id).filter(pl.col("metric") == "delta_rms")
    assert frame["value"].min() > 0


def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(GradreelError, match="being filled by another process"), locked(tmp_path):
        pass


def test_the_id_is_that_of_the_definition() -> None:
    spec = run_spec(SIZE, "mesh", 1e-3, 0)
    again = RunSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert again == spec
    assert again.id == spec.id
    assert again.model_config() == TINY
    others = [
        run_spec(SIZE, "mesh", 2e-3, 0),
        run_spec(SIZE, "mesh", 1e-3, 1),
        run_spec(SIZE, "mesh+sign_only", 1e-3, 0),
        run_spec(SIZE, "mesh", 1e-3, 0, matched=spec.id),
        run_spec(replace(SIZE, steps=7), "mesh", 1e-3, 0),
        run_spec(replace(SIZE, model=replace(TINY, num_experts=8)), "mesh", 1e-3, 0),
    ]
    assert len({spec.id, *(other.id for other in others)}) == 7
    # Results that are kept name runs by their id: a new entry of a run or a model must not change it.
    assert spec.id == "31a21e9c10461911"
    with pytest.raises(GradreelError, match="no definition of a run"):
        RunSpec.from_dict({"steps": 1})


def test_equal_runs_are_made_once(tmp_path: Path) -> None:
    spec = run_spec(SIZE, "sgd", 1e-3, 0)
    first = execute(spec, tmp_path)
    at = (tmp_path / spec.id / "run.json").stat().st_mtime_ns
    assert execute(spec, tmp_path) == first
    assert (tmp_path / spec.id / "run.json").stat().st_mtime_ns == at
    other = execute(spec, tmp_path / "elsewhere")
    assert other.final_loss == first.final_loss
    assert other.window_losses == first.window_losses
    assert read_run_frame(tmp_path, spec.id).equals(read_run_frame(tmp_path / "elsewhere", spec.id))


def test_the_best_rate_is_the_lowest_loss_and_an_edge_is_told(whole: tuple[Path, pl.DataFrame]) -> None:
    plan = Plan(PRESET, SIZE)
    specs = plan.first()
    runs = {spec.id: finished(whole[0], spec.id) for spec in specs}
    plan.second({key: value for key, value in runs.items() if value is not None})
    for arm in PRESET.arms:
        grid = plan.cells[Cell("grid", "", arm, 0)]
        losses = {spec.lr: runs[spec.id].final_loss for spec in grid}  # type: ignore[union-attr]
        assert plan.tuning["", arm].best == min(losses, key=lambda lr: losses[lr] or 0)
    assert sum("edge of its grid" in note for note in plan.notes) == 3  # two points are all edge
