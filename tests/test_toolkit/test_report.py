"""The report says what the frame shows, says when it shows nothing, and is one file that asks for nothing."""

from __future__ import annotations

import importlib.util
import re
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import polars as pl
import pytest

from toolkit.frame import OPEN_LOOP_NOTE
from toolkit.plots import PLOTS, Plot
from toolkit.report import verdict, write_report
from toolkit.report._measures import MEASURES, few_token_amplification, number, percent, significant, unit_values
from toolkit.report._tables import provenance_blocks, recipe_table, trace_id
from toolkit.report._verdict import bootstrap_interval, compare
from traces.errors import GradreelError


def load_helper() -> ModuleType:
    path = Path(__file__).with_name("made_up_frames.py")
    spec = importlib.util.spec_from_file_location("made_up_frames", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


made_up = load_helper()
ADAMW, SINKGD, MESH = (made_up.RECIPES[name] for name in ("adamw", "sinkgd", "mesh"))
BOTH = {"sinkgd": SINKGD, "mesh": MESH}


def frame_of(steps: int = 10, **changes: Any) -> pl.DataFrame:
    return made_up.made_up_frame(steps=tuple(range(1, steps + 1)), lags=(1, 2), **changes)


class Page(HTMLParser):
    """Collects what a browser would act on."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.handlers: list[str] = []
        self.ids: list[str] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.unbalanced: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "br", "wbr", "img", "link", "path", "use", "image", "rect", "input"):
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "action", "poster", "srcset", "data"):
                self.links.append(value or "")
            if name.startswith("on"):
                self.handlers.append(name)
            if name == "id":
                self.ids.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            while self.open.pop() != tag:
                self.unbalanced.append(tag)

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    path = tmp_path_factory.mktemp("report") / "new folder" / "report.html"
    frame = frame_of(recipes={"adamw": ADAMW, **BOTH})
    report = write_report(
        path,
        frame,
        title="A <b>title</b>",
        provenance={
            "trace": {"id": "3f9a1c"},
            "backend": "cpu",
            "recipes": ["adamw", "mesh"],
            "notes": ["A note & more."],
        },
        notes=["A note & more."],
    )
    return report, path.read_text(encoding="utf-8")


def test_the_verdict_comes_before_figures_tables_and_provenance(written: tuple[Any, str]) -> None:
    report, page = written
    text = " ".join("".join(Page(page).words).split())
    places = [text.index(words) for words in (report.verdict, "Figures", "Recipes side by side", "Provenance")]
    assert places == sorted(places)


def test_every_figure_carries_the_open_loop_sentence_and_the_trace(written: tuple[Any, str]) -> None:
    report, page = written
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", page, flags=re.DOTALL)
    assert len(captions) == len([plot for plot in PLOTS.all() if plot.about == "updates"])
    for caption in captions:
        assert OPEN_LOOP_NOTE in caption
        assert "3f9a1c" in caption
    assert report.not_drawn == ()


def test_the_page_asks_for_nothing_from_outside(written: tuple[Any, str]) -> None:
    page = Page(written[1])
    assert "http://" not in written[1]
    assert "https://" not in written[1]
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in page.links)
    assert not {"script", "link", "iframe", "object", "base", "form"} & set(page.tags)
    assert page.handlers == []
    assert "@import" not in written[1]
    assert re.findall(r"url\((?!#)", written[1]) == []
    assert "default-src 'none'" in written[1]


def test_the_page_is_well_formed_and_bounded(written: tuple[Any, str]) -> None:
    page = Page(written[1])
    assert len(page.ids) == len(set(page.ids))
    assert page.unbalanced == []
    assert page.open == []
    assert len(written[1].encode()) < 5_000_000
    assert "A &lt;b&gt;title&lt;/b&gt;" in written[1]
    assert written[1].count("A note &amp; more.") == 1
    for words in ("prefers-color-scheme: dark", "@media print", "width=device-width", "tabular-nums"):
        assert words in written[1]


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    bad = '"><script>alert(1)</script><img src=http://evil.example/x onerror=alert(2)>$\\frac{'
    frame = frame_of(5, recipes=BOTH).with_columns(
        recipe=pl.col("recipe") + pl.lit(bad), run=pl.lit(bad), param=pl.lit(bad) + pl.col("param")
    )
    report = write_report(
        tmp_path / "r.html", frame, title=bad, provenance={bad: {bad: bad}, "list": [bad]}, notes=[bad]
    )
    text = report.path.read_text(encoding="utf-8")
    page = Page(text)
    assert not {"script", "link", "iframe"} & set(page.tags)
    assert page.handlers == []
    assert all(link.startswith(("#", "data:")) for link in page.links)
    assert "\x00" not in text


def test_lone_surrogates_do_not_stop_the_report(tmp_path: Path) -> None:
    frame = frame_of(3, recipes=BOTH).filter(pl.col("metric") == "update_cos")
    report = write_report(tmp_path / "r.html", frame, title="\ud800", provenance={"x": "\udfff"})
    assert report.path.is_file()


def test_a_plot_without_its_metric_is_named_with_what_to_add(tmp_path: Path) -> None:
    frame = frame_of(5, recipes=BOTH).filter(~pl.col("metric").is_in(["grad_cos", "state_bytes"]))
    report = write_report(tmp_path / "r.html", frame, title="t", provenance={})
    text = report.path.read_text(encoding="utf-8")
    assert "Temporal instability of the gradients" in report.not_drawn
    assert "Memory kept between steps" in report.not_drawn
    assert "add --metric grad_cos" in text
    assert "add --metric state_bytes" in text


def test_a_plot_that_breaks_is_named_and_the_report_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(frame: pl.DataFrame, **options: Any) -> Any:
        raise ZeroDivisionError("of <mine>")

    monkeypatch.setattr(PLOTS, "_added", {"mine": Plot("mine", "My plot", ("update_cos",), broken, "A caption.")})
    frame = frame_of(3, recipes=BOTH).filter(pl.col("metric") == "update_cos")
    report = write_report(tmp_path / "r.html", frame, title="t", provenance={})
    assert "My plot" in report.not_drawn
    assert "How long updates keep their direction" not in report.not_drawn
    assert "ZeroDivisionError: of &lt;mine&gt;" in report.path.read_text(encoding="utf-8")


def test_a_path_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(GradreelError, match="cannot write the report") as caught:
        write_report(tmp_path / "file" / "r.html", frame_of(2, recipes=BOTH), title="t", provenance={})
    assert "\n" not in str(caught.value)
    with pytest.raises(GradreelError, match="cannot write the report"):
        write_report(tmp_path, frame_of(2, recipes=BOTH), title="t", provenance={})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]


def test_an_empty_frame_still_gives_a_report(tmp_path: Path) -> None:
    report = write_report(tmp_path / "r.html", made_up.as_frame([]), title="t", provenance={})
    assert report.verdict.startswith("No verdict:")
    assert len(report.not_drawn) == len([plot for plot in PLOTS.all() if plot.about == "updates"])


def test_the_verdict_says_worse_when_sinkhorn_is_worse() -> None:
    found = verdict(frame_of(recipes={"adamw": ADAMW, **BOTH}))
    assert found.outcome == "less stable"
    assert "sinkgd's updates are less stable over time than mesh's" in found.headline
    cosine = found.comparisons[0]
    assert (cosine.left, cosine.right, cosine.units) == ("sinkgd", "mesh", 16)
    assert cosine.low is not None
    assert cosine.high is not None
    assert cosine.low < SINKGD[0] - MESH[0] < cosine.high < 0
    assert any("Against the reference" in d and "adamw" in d for d in found.details)
    assert "95% interval over experts" in found.headline
    assert any("not what another seed, model or data set would give" in d for d in found.details)


def test_parameters_of_one_expert_are_one_unit() -> None:
    """A second copy of every parameter says nothing new, and must not make the interval narrower."""
    frame = frame_of(recipes={"sinkgd": MESH, "mesh": MESH}, seed=3)
    name = frame.filter(pl.col("role") == "routed_expert")["param"][0]
    one = frame.filter(pl.col("param") == name)
    once = compare(one, MEASURES[0], "sinkgd", "mesh")
    again = compare(pl.concat([one, one.with_columns(param=pl.lit("copy"))]), MEASURES[0], "sinkgd", "mesh")
    assert once is not None
    assert again is not None
    assert once.low is not None
    assert (again.low, again.high, again.units) == pytest.approx((once.low, once.high, once.units))


def test_the_verdict_says_better_when_sinkhorn_is_better() -> None:
    found = verdict(frame_of(recipes={"sinkgd": MESH, "mesh": SINKGD}))
    assert found.outcome == "more stable"
    assert "not less but more stable" in found.headline


def test_the_verdict_is_open_when_the_recipes_do_not_differ() -> None:
    outcomes = [verdict(frame_of(recipes={"sinkgd": MESH, "mesh": MESH}, seed=s)).outcome for s in range(4)]
    assert outcomes.count("not decided") >= 2, outcomes
    same = frame_of(recipes={"sinkgd": MESH})
    twin = same.filter(pl.col("recipe") == "sinkgd").with_columns(recipe=pl.lit("mesh"))
    found = verdict(pl.concat([same, twin]))
    assert found.outcome == "equal"
    assert "equally stable" in found.headline
    nearly = twin.with_columns(value=pl.col("value") + 1e-4)
    assert verdict(pl.concat([same, nearly])).outcome == "equal"


def test_measures_that_disagree_are_said_to() -> None:
    frame = frame_of(recipes=BOTH).with_columns(
        value=pl.when(pl.col("metric") == "update_sign_flip_rate").then(1 - pl.col("value")).otherwise(pl.col("value"))
    )
    found = verdict(frame)
    assert found.outcome == "mixed"
    assert found.headline.startswith("The measures disagree.")


def test_the_verdict_never_speaks_of_losses() -> None:
    frames = [
        frame_of(recipes={"adamw": ADAMW, **BOTH}),
        frame_of(recipes={"sinkgd": MESH, "mesh": SINKGD}),
        frame_of(recipes={"sinkgd": MESH, "mesh": MESH}),
        frame_of(recipes={"adamw": ADAMW, "mesh": MESH}),
        frame_of(recipes={"mesh": MESH}),
        made_up.as_frame([]),
    ]
    for frame in frames:
        found = verdict(frame)
        text = " ".join([found.headline, *found.details]).lower()
        assert not re.search(r"\bloss|perplexity|converge|better optimizer|\bwins\b", text), text


@pytest.mark.parametrize(
    ("recipes", "words"),
    [
        ({"mesh": MESH}, "Nothing to compare: only mesh"),
        ({"adamw": ADAMW, "mesh": MESH}, "for lack of sinkgd"),
        ({"adamw": ADAMW, "sgd": made_up.RECIPES["sgd"]}, "for lack of sinkgd and mesh"),
        ({"adamw": ADAMW, "sinkgd": SINKGD}, "less stable over time than adamw's"),
        (
            {"sinkgd+sign_only": SINKGD, "mesh_b": MESH},
            "sinkgd+sign_only's updates are less stable over time than mesh_b",
        ),
    ],
)
def test_absent_recipes_lead_to_a_truthful_sentence(recipes: dict[str, Any], words: str) -> None:
    found = verdict(frame_of(recipes=recipes))
    assert words in found.headline
    if "mesh" not in recipes and "mesh_b" not in recipes and "sinkgd" in recipes:
        assert any("MESH was not replayed" in d for d in found.details)


def test_absent_metrics_lead_to_a_truthful_sentence() -> None:
    frame = frame_of(recipes=BOTH)
    none = verdict(frame.filter(~pl.col("metric").is_in(["update_cos", "update_sign_flip_rate"])))
    assert none.outcome == "no comparison"
    assert "add --metric update_cos" in none.headline
    null = verdict(frame.with_columns(value=pl.lit(None, dtype=pl.Float64)))
    assert "neither update_cos nor update_sign_flip_rate" in null.headline
    only_flips = verdict(frame.filter(pl.col("metric") != "update_cos"))
    assert only_flips.outcome == "less stable"
    assert "cosine" not in only_flips.headline
    assert any("left out: update_cos" in d for d in only_flips.details)
    dense = verdict(frame.filter(pl.col("role") != "routed_expert"))
    assert "no routed experts" in dense.headline


def test_summaries_over_experts_are_compared_by_parameter_and_said_to_be() -> None:
    found = verdict(frame_of(recipes=BOTH, summaries=True, layers=4))
    assert found.outcome == "less stable"
    assert found.comparisons[0].units == 8
    assert any("summaries over experts" in d for d in found.details)


def test_too_few_units_decide_nothing() -> None:
    found = verdict(frame_of(recipes=BOTH, summaries=True, layers=2))
    assert found.comparisons[0].units == 4
    assert found.outcome == "not decided"
    assert "too few parameters for an interval" in found.headline


def test_the_interval_covers_the_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(5)
    hits = 0
    for _ in range(200):
        low, high = bootstrap_interval(rng.normal(0.3, 1.0, 40))
        assert low is not None
        assert high is not None
        hits += low <= 0.3 <= high
    assert 178 <= hits <= 199


def test_the_interval_is_repeatable_bounded_and_defined_at_the_edges() -> None:
    values = np.random.default_rng(1).normal(size=50)
    assert bootstrap_interval(values) == bootstrap_interval(values)
    assert bootstrap_interval(values[:5]) == (None, None)
    assert bootstrap_interval(np.full(9, 0.25)) == (0.25, 0.25)
    many = bootstrap_interval(np.random.default_rng(1).normal(size=20_000))
    assert many[0] is not None
    assert many[0] < 0.02


def test_the_few_token_ratio_is_free_of_the_lr_and_right_on_a_planted_law() -> None:
    base = {"metric": "amplification", "recipe": "mesh", "role": "routed_expert", "param": "w", "layer": 0, "step": 1}
    tokens = [1, 2, 4, 8, 16, 32, 64, 128]
    rows = [
        {**base, "expert": e, "step": s, "support": float(t), "value": 7.0 * t**-0.5}
        for s in (1, 2)
        for e, t in enumerate(tokens)
    ]
    found = few_token_amplification(made_up.as_frame(rows))
    # quarters: 1 and 2 tokens against 64 and 128, geometric mean 2 ** 6.5
    expected = {0: 2**3.25, 1: 2**2.75}
    assert dict(found.select("expert", "value").iter_rows()) == pytest.approx(expected)
    scaled = made_up.as_frame([{**row, "value": 1e-3 * row["value"]} for row in rows])
    np.testing.assert_allclose(few_token_amplification(scaled)["value"], found["value"])
    even = made_up.as_frame([{**row, "support": 9.0} for row in rows])
    assert few_token_amplification(even).is_empty()


def test_other_lags_do_not_leak_into_lag_one() -> None:
    base = {"metric": "update_cos", "recipe": "mesh", "role": "routed_expert", "param": "w", "expert": 0}
    rows = [{**base, "lag": 1, "value": 0.5}, {**base, "lag": 8, "value": -1.0}]
    assert unit_values(made_up.as_frame(rows), "update_cos", 1)["value"].to_list() == [0.5]


def test_the_recipe_table_marks_what_is_absent() -> None:
    table = recipe_table(frame_of(recipes=BOTH).filter(pl.col("metric") != "zombie_displacement"))
    assert ["".join(row[0]) for row in table.rows] == ["sinkgd", "mesh"]
    assert table.absent == ("zombie_displacement",)
    titles = [title for title, _ in table.columns]
    assert table.rows[0][2][titles.index("zombie")].text == "–"
    assert table.rows[1][2][titles.index("pinned gradient")].text == "9.00 MiB"


def test_provenance_is_in_blocks_and_bounded() -> None:
    assert provenance_blocks({"recipes": ["adamw", "mesh"]})[0].rows == (("recipes", "adamw, mesh"),)
    blocks = provenance_blocks(
        {"a": {"b": [1, "x"], "c": {}, "n": None, "deep": {"er": 0}}, "d": "y" * 5000, "e": False}
    )
    assert [block.heading for block in blocks] == ["", "a"]
    assert blocks[1].rows == (("b", '[1, "x"]'), ("deep.er", "0"))
    assert len(blocks[0].rows[0][1]) < 2100
    assert blocks[0].rows[1] == ("e", "False")
    (many,) = provenance_blocks({str(i): i for i in range(1000)})
    assert len(many.rows) == 301
    assert many.long
    assert many.rows[-1][1].startswith("700 more")
    assert provenance_blocks({}) == []


def test_the_trace_is_named_from_the_provenance_else_the_frame() -> None:
    frame = frame_of(2, recipes=BOTH)
    assert trace_id({"trace": {"id": "abc"}}, frame) == "abc"
    assert trace_id({"trace_id": "def"}, frame) == "def"
    assert trace_id({}, frame.filter(pl.col("run") == "demo-3f9a1c")) == "demo-3f9a1c"
    assert trace_id({}, frame).endswith("more")


@pytest.mark.parametrize(
    ("value", "show", "text"),
    [
        (-0.004, number, "0.00"),
        (-0.5, number, "−0.50"),
        (0.4321, percent, "43%"),
        (0.0123, percent, "1.2%"),
        (123.4, significant, "123"),
        (0.5, significant, "0.50"),
        (2.5e-7, significant, "2.5e−7"),
        (0.0, significant, "0"),
    ],
)
def test_numbers_are_written_alike(value: float, show: Any, text: str) -> None:
    assert show(value) == text
