"""Plots, one per file. See `_plot.py` for what a plot is."""

from toolkit.plots._caption import caption_of
from toolkit.plots._plot import Plot
from toolkit.plots._save import save_figure
from traces.registry import Registry

PLOTS: Registry[Plot] = Registry("toolkit.plots", "PLOT", "plot")

__all__ = ["PLOTS", "Plot", "caption_of", "save_figure"]
