"""DBRX: an expert is a run of rows of three 2-D weights [E * F, H]; the last of them is used untransposed."""

from __future__ import annotations

from traces.families._family import Family

FAMILY = Family(name="dbrx", classes=("DbrxExperts",), fused=True, transposed=("w2",))
