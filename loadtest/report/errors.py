"""The reports' branch of the error tree."""

from __future__ import annotations

from loader.errors import ShardrankError


class ReportError(ShardrankError, kind="report"):
    """A report can't be made."""


class PageFileError(ReportError, kind="report_file"):
    """The page's file can't be written. The message has its path and the reason."""


class HistogramError(ReportError, http_status=400, grpc_status="INVALID_ARGUMENT", kind="report_histogram"):
    """A histogram in a result is no HDR histogram, or holds another count than the result says."""


class ComparisonError(ReportError, http_status=400, grpc_status="INVALID_ARGUMENT", kind="report_comparison"):
    """Results that can't be compared: other numbers of rounds, no baseline, a ratio to nothing."""
