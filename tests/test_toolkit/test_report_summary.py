"""The tables of a terminal: what a cell is, and how it is written."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from toolkit.frame import FrameWriter
from toolkit.report._summary import number, print_summary, summary


def frame_of(*rows):
    writer = FrameWriter(constants={"role": "routed_expert", "unit": "1"})
    writer.write(rows)
    return writer.close().collect()


def cells(frame):
    """{(label, column heading): text} of all tables."""
    found = {}
    for part in summary(frame):
        if isinstance(part, str):
            continue
        labels = list(part.columns[0].cells)
        for column in part.columns[1:]:
            found |= {(label, column.header): cell for label, cell in zip(labels, column.cells, strict=True)}
    return found


def test_values_are_averaged_and_costs_added_over_parameters():
    def rows(metric, unit, values):
        return [
            {"recipe": "mesh", "param": param, "step": step, "metric": metric, "unit": unit, "value": value}
            for (param, step), value in values.items()
        ]

    values = {("a", 1): 1.0, ("a", 2): 3.0, ("b", 1): 10.0, ("b", 2): 10.0}
    found = cells(frame_of(*rows("update_rms", "1", values), *rows("step_ms", "ms", values)))
    assert found == {("mesh", "update\nrms"): "6", ("mesh", "step\nms"): "12"}


def test_of_several_lags_the_smallest_and_of_summaries_the_mean():
    base = {"recipe": "mesh", "metric": "update_cos", "step": 1}
    lags = [base | {"lag": lag, "value": lag / 10, "flag": "mean"} for lag in (4, 2)]
    others = [base | {"lag": 2, "value": 0.9, "flag": flag} for flag in ("p10", "p90")]
    missing = base | {"lag": 2, "value": None, "flag": "undefined"}
    assert cells(frame_of(*lags, *others, missing)) == {("mesh", "update\ncos\nlag 2"): "0.2"}


def test_printed_text_has_notes_divergence_and_other_roles():
    rows = [
        {"recipe": "sgd", "metric": "update_rms", "value": 1.0},
        {"recipe": "sgd", "metric": "update_rms", "value": 1.0, "role": "router"},
        {"recipe": "sgd", "metric": "diverged", "step": 7, "value": 7.0, "flag": "diverged"},
    ]
    text = io.StringIO()
    print_summary(Console(file=text, width=80), frame_of(*rows), notes=["a [b]note[/b]"])
    shown = text.getvalue()
    assert "The Frame also holds: router" in shown
    assert "Note: a [b]note[/b]" in shown
    assert "sgd diverged: weights not finite from step 7 on, in 1 matrices" in shown


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, "1", "–"),
        (0.0, "1", "0"),
        (0.12345, "1", "0.123"),
        (123456.0, "1", "1.23e+05"),
        (12345.6, "1", "12346"),
        (0.00012, "1", "1.20e-04"),
        (512, "B", "512 B"),
        (1536, "B", "1.5 KiB"),
        (3 * 2**40, "B", "3072 GiB"),
    ],
)
def test_numbers(value, unit, text):
    assert number(value, unit) == text


def test_an_empty_frame_has_no_tables():
    assert list(summary(frame_of())) == []
