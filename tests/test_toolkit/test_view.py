"""The page of `gradreel view`: what it shows of a trace and a run, whom it serves, and what a browser makes of it."""

from __future__ import annotations

import http.client
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import polars as pl
import pytest

from toolkit.frame import conform, write_frame
from toolkit.view import View, view
from toolkit.view.page._content import load_of, pooled
from toolkit.view.page._figures import bars, expert_at, heatmap, row_of
from traces.errors import GradreelError
from traces.reader import open_trace
from traces.synthetic import Expected, write_synthetic

pytest.importorskip("dash", reason="the page needs dash, of the extra `view`")


def _beside(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


headless_chromium = _beside("headless_chromium")
COMMAND = [sys.executable, "-c", "from ablations.cli import main; main()"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Expected]:
    path = tmp_path_factory.mktemp("view") / "reel.trace"
    return path, write_synthetic(path, steps=10, num_experts=6, tokens=48, padding=0.25, idle_runs={3: (4, 3)})


@pytest.fixture
def seen(made: tuple[Path, Expected]) -> Iterator[View]:
    opened = view(made[0])
    yield opened
    opened.close()


def test_loads_are_the_executed_slots_that_are_no_padding(made: tuple[Path, Expected], seen: View) -> None:
    load = seen.content.load(0)
    counts = made[1].tokens_per_expert[:, 0, :].T
    assert load.steps == list(made[1].steps)
    np.testing.assert_allclose(load.matrix, counts / counts.sum(0), rtol=1e-6)
    order = [load.experts[i] for i in load.order()]
    for row, expert in enumerate(order):
        assert row_of(load, expert) == row
        assert expert_at(load, row) == expert


def test_curves_show_the_gradient_and_updates_that_a_replay_measures(made: tuple[Path, Expected], seen: View) -> None:
    figure = seen.figure("curves", layer=0, expert=2, step=5, recipes=["mesh"])
    titles = [a.text for a in figure.layout.annotations]
    assert {"gradient norm [L2]", "gradient cosine, lag 1", "gradient sign flips, lag 1"} <= set(titles)
    trace = open_trace(made[0])
    expected = [float(trace.gradient("layers.0.mlp.experts.down_proj", s, [2]).norm()) for s in trace.steps]
    shown = next(t for t in figure.data if t.yaxis == f"y{1 + titles.index('gradient norm [L2]')}")
    np.testing.assert_allclose(np.array(shown.y, float), expected, rtol=1e-5)
    assert {t.name for t in figure.data} == {"recorded run", "mesh"}
    with pytest.raises(GradreelError, match="layer 7 is not here; allowed: 0"):
        seen.figure("bars", layer=7)


def test_a_heatmap_is_never_larger_than_a_screen() -> None:
    steps, experts = 1500, 700
    table = pl.DataFrame({"step": np.repeat(np.arange(steps), experts), "expert": np.tile(np.arange(experts), steps)})
    load = load_of(table.with_columns(value=pl.lit(1 / experts)))
    z = np.array(heatmap(load, step=3, expert=9).data[0].z)
    assert z.shape[0] <= 512
    assert z.shape[1] <= 600
    np.testing.assert_allclose(z, 0, atol=1e-6)  # an average of uniform loads is the uniform load
    assert row_of(load, 699) < z.shape[0]
    values, starts = pooled(np.array([[1.0, np.nan, 3.0, 5.0, np.nan]]), 1, 3)
    np.testing.assert_array_equal(values, [[1.0, 4.0, np.nan]])
    assert starts.tolist() == [0, 2, 4]
    assert "0 of 700 experts idle" in bars(load, 4, None).layout.title.text


def test_a_run_without_experts_shows_its_losses(tmp_path: Path) -> None:
    rows = [
        {"arm": a, "recipe": a, "seed": s, "step": t, "metric": "loss", "value": 5.0 - t + s, "unit": "nats"}
        for a in ("adamw", "mesh")
        for s in (0, 1)
        for t in (1, 2, 3)
    ]
    table = pl.DataFrame(rows)
    lacking = [n for n in conform_columns() if n not in table.columns]
    frame = conform(table.with_columns(pl.lit("" if n == "flag" else None).alias(n) for n in lacking), "test")
    write_frame(tmp_path / "frame.parquet", frame)
    figure = view(tmp_path).figure("curves")
    assert {(t.name, tuple(t.y)) for t in figure.data} == {(a, (4.5, 3.5, 2.5)) for a in ("adamw", "mesh")}
    with pytest.raises(GradreelError, match="neither a trace nor"):
        view(tmp_path.parent / "nowhere" if (tmp_path.parent / "nowhere").mkdir() is None else tmp_path)


def conform_columns() -> list[str]:
    from toolkit.frame import SCHEMA

    return list(SCHEMA)


def answer(url: str, path: str | None = None, method: str = "GET", **headers: str) -> int:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=20)
    connection.request(method, parts.path if path is None else path, headers=headers)
    return connection.getresponse().status


def test_only_this_machine_is_served_and_only_under_the_address(seen: View) -> None:
    url = seen.start()
    assert urlsplit(url).hostname == "127.0.0.1"
    assert answer(url) == 200
    assert answer(url, Host="evil.example") == 403
    assert answer(url, Host=f"evil.example:{urlsplit(url).port}") == 403
    assert answer(url, Origin="http://evil.example") == 403
    assert answer(url, "/") == 404
    prefix = urlsplit(url).path
    for tail in (
        "assets/../../../_open.py",
        "assets/%2e%2e/%2e%2e/_open.py",
        "_dash-component-suites/dash/../../os.py",
    ):
        assert answer(url, prefix + tail) in (400, 404, 500)
    assert answer(url, method="PUT") == 405
    assert "iframe" in seen._repr_html_()
    outside = socket.socket()
    outside.settimeout(2)
    assert outside.connect_ex(("127.0.0.2", urlsplit(url).port)) != 0  # bound to one address, not to all
    outside.close()


def run_view(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, "view", *words, "--no-browser"], capture_output=True, text=True, timeout=120)


def test_a_damaged_trace_and_a_busy_port_are_one_line(made: tuple[Path, Expected], tmp_path: Path) -> None:
    damaged = tmp_path / "cut.trace"
    shutil.copytree(made[0], damaged)
    (damaged / "header.json").write_text("{")
    done = run_view(str(damaged))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = run_view(str(made[0]), "--port", str(taken.getsockname()[1]))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "cannot serve on port" in done.stderr


def test_the_page_in_a_browser_and_its_end(made: tuple[Path, Expected], tmp_path: Path) -> None:
    if headless_chromium.chromium() is None:
        pytest.skip("no Chromium is installed here (Debian: apt install chromium)")
    pytest.importorskip("websocket", reason="the browser is driven with websocket-client, of the extra `dev`")
    command = [*COMMAND, "view", str(made[0]), "--no-browser"]
    server = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    )
    try:
        assert server.stdout is not None
        url = server.stdout.readline().removeprefix("View: ").strip()
        with headless_chromium.open_page(tmp_path / "profile") as page:
            browse(page, url)
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0
    finally:
        server.kill()


def browse(page: Any, url: str) -> None:
    page.call("Page.navigate", url=url)
    page.wait("!!(document.querySelector('#heat image') && document.querySelector('#bars .barlayer path'))")
    page.wait(
        "document.querySelectorAll('#curves .scatterlayer path').length > 3"
    )  # load, then the gradient's measures
    title = "document.querySelector('#bars .gtitle').textContent"
    picked = "document.querySelector('#curves .gtitle').textContent"
    before, drawn = page.run(title), page.run(picked)
    page.run("document.querySelector('#step [role=slider]').focus()")
    for kind in ("keyDown", "keyUp"):
        page.call("Input.dispatchKeyEvent", type=kind, key="ArrowRight", code="ArrowRight", windowsVirtualKeyCode=39)
    page.wait(f"{title} !== {before!r}")
    box = page.run(
        "(() => { const b = document.querySelector('#heat .nsewdrag').getBoundingClientRect();"
        "return [b.x + b.width * 0.31, b.y + b.height * 0.93] })()"
    )
    for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
        button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
        page.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], **button)
        time.sleep(0.2)
    page.wait(f"{picked} !== {drawn!r}")
    page.run("document.querySelector('#compute').click()")
    page.wait("/^Computed updates/.test(document.querySelector('#note').innerText)", 120)
    page.wait("document.querySelector('#curves').textContent.includes('update RMS')")
    assert page.errors == []
    own = (url.rsplit("/", 2)[0], "data:", "blob:")
    assert [address for address in page.requests if not address.startswith(own)] == []
