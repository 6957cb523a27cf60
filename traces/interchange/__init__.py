"""Routing and tensors to and from the files of other tools.

`import_routing` makes a trace of a routing-only log, on which load and routing measures work; `export_routing` writes
such logs, `export_tensors` plain safetensors. Formats:

- `megatron`: what Megatron-LM's RouterTracer writes (`--moe-routing-trace-path`): a folder of
  `router_trace_rank*.jsonl`, or one such file, one record per step, layer and micro-step. Fields read: `step`, `layer`,
  `top_indices`, and where they are there `block`, `mtp_idx`, `num_tokens`, `topk`, `stage`; others are left alone. Its
  ids are the router's choice before tokens are dropped.
- `csv`: a line of column names, then a line per activation: `layer` and `expert`, and where they are there `step` and
  `token`. Without `token` each activation counts as a token of its own (`top_k` joins so many in a row); without `step`
  a new step begins wherever the layer goes down.

An id of -1 is a slot that was not executed. Steps do not decrease within a file.
"""

from __future__ import annotations

from traces.interchange._export import export_routing, export_tensors
from traces.interchange._import import import_routing

__all__ = ["export_routing", "export_tensors", "import_routing"]
