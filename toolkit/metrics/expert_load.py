"""Share of the routed slots that each expert got."""

from __future__ import annotations

from toolkit.metrics._load import loads, of_counts
from toolkit.metrics._metric import Metric

_init, _update, _result = of_counts(loads)

METRIC = Metric(
    name="expert_load",
    group="load",
    needs=("routing",),
    scope="layer",
    unit="1",
    formula="p_e = c_e / sum over e of c_e",
    citation="Fedus, Zoph and Shazeer 2021, arXiv 2101.03961, section 2.2 (f_i, there of top-1 routing)",
    init=_init,
    update=_update,
    result=_result,
    doc="c_e = tokens_per_expert; null in a step without tokens. One row per step and one over the whole recording.",
)
