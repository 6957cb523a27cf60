"""The report: one self-contained HTML file about one Frame, verdict first."""

from toolkit.report._verdict import Comparison, Verdict, verdict
from toolkit.report._write import Report, write_report

__all__ = ["Comparison", "Report", "Verdict", "verdict", "write_report"]
