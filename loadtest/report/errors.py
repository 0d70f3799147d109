"""The reports' branch of the error tree.

```
ShardrankError
└── ReportError                 500 INTERNAL             a report that can't be made
    ├── PageFileError                                    the page can't be written
    ├── HistogramError          400 INVALID_ARGUMENT     a result's histogram that can't be decoded
    └── ComparisonError         400 INVALID_ARGUMENT     results that can't be compared
```
"""

from __future__ import annotations

from loader.errors import ShardrankError


class ReportError(ShardrankError):
    """A report can't be made."""

    kind = "report"


class PageFileError(ReportError):
    """The page's file can't be written. The message has its path and the reason."""

    kind = "report_file"


class HistogramError(ReportError):
    """A histogram in a result is no HDR histogram, or holds another count than the result says."""

    http_status = 400
    grpc_status = "INVALID_ARGUMENT"
    kind = "report_histogram"


class ComparisonError(ReportError):
    """Results that can't be compared: other numbers of rounds, no baseline, a ratio to nothing."""

    http_status = 400
    grpc_status = "INVALID_ARGUMENT"
    kind = "report_comparison"
