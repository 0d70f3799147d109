"""The errors of workloads, load tests, comparisons, reports and drills; what a drill finds is no error."""

from __future__ import annotations

from loader.errors import ShardrankError


class WorkloadError(ShardrankError, http_status=400, grpc_status="INVALID_ARGUMENT", kind="workload"):
    """A workload, a distribution or an API that there is not. The message says what is allowed."""


class AnswerError(WorkloadError, http_status=500, grpc_status="INTERNAL", kind="workload_answer"):
    """An answer that arrived with success but holds no scores. The message says what is wrong with it."""


class LoadError(ShardrankError, kind="load"):
    """A measurement can't be run to its end. Requests of an open loop that fail are no error but its result."""


class LoadConfigError(LoadError, http_status=400, grpc_status="INVALID_ARGUMENT", kind="load_config"):
    """A target, a rate, a workload, an environment or a file that can't be used. The message names the option."""


class ResultFileError(LoadError, http_status=400, grpc_status="INVALID_ARGUMENT", kind="load_result"):
    """A result's file that is not there, can't be read or written, or holds something else."""


class GeneratorError(LoadError, kind="load_generator"):
    """A process of the measurement ended by itself, or did not answer in time."""


class RequestFailedError(LoadError, kind="load_request"):
    """A request failed while a server was kept busy: its cost would be that of errors."""


class ServerFailedError(LoadError, kind="load_server"):
    """A measured server ended by itself, or was not ready in time. The message has the end of its log."""


class ScoresDifferError(LoadError, kind="load_scores"):
    """A server's scores are not the expected ones. A figure of wrong answers says nothing."""


class CompareStoreError(LoadError, http_status=400, grpc_status="INVALID_ARGUMENT", kind="compare_store"):
    """A store's model has other tables or features than the workload's."""


class ComparisonError(LoadError, http_status=400, grpc_status="INVALID_ARGUMENT", kind="report_comparison"):
    """Results that can't be compared: other numbers of rounds, no baseline, a ratio to nothing."""


class DrillError(ShardrankError, kind="drill"):
    """A drill can't be run to its end."""
