"""Metrics, one per file. See `_metric.py` for what a metric is."""

from toolkit.metrics._metric import RECIPE_NEEDS, TRACE_NEEDS, Measure, Metric, Subject, nothing
from traces.registry import Registry

METRICS: Registry[Metric] = Registry("toolkit.metrics", "METRIC", "metric")

__all__ = ["METRICS", "RECIPE_NEEDS", "TRACE_NEEDS", "Measure", "Metric", "Subject", "nothing"]
