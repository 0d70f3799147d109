"""The errors of workloads, load tests and comparisons."""

from __future__ import annotations

from loader.errors import ShardrankError


class WorkloadError(ShardrankError):
    """A workload, a distribution or an API that there is not. The message says what is allowed."""

    http_status = 400
    grpc_status = "INVALID_ARGUMENT"
    kind = "workload"


class PrepareError(WorkloadError):
    """A workload's snapshot that can't be written into a store."""

    http_status = 500
    grpc_status = "INTERNAL"
    kind = "workload_prepare"


class AnswerError(WorkloadError):
    """An answer that arrived with success but holds no scores. The message says what is wrong with it."""

    http_status = 500
    grpc_status = "INTERNAL"
    kind = "workload_answer"


class LoadError(ShardrankError):
    """A measurement can't be run to its end. Requests of an open loop that fail are no error but its result."""

    kind = "load"


class LoadConfigError(LoadError):
    """A target, a rate, a workload or a file of marks that can't be used. The message names the option."""

    http_status = 400
    grpc_status = "INVALID_ARGUMENT"
    kind = "load_config"


class ResultFileError(LoadError):
    """A result's file that is not there, can't be read or written, or holds something else."""

    http_status = 400
    grpc_status = "INVALID_ARGUMENT"
    kind = "load_result"


class GeneratorError(LoadError):
    """A process of the measurement ended by itself, or did not answer in time."""

    kind = "load_generator"


class RequestFailedError(LoadError):
    """A request failed while a server was kept busy: its cost would be that of errors."""

    kind = "load_request"


class LateAnswerError(RequestFailedError):
    """A request's deadline passed before it was answered: more is asked of the server than it can do in that time."""

    kind = "load_late"


class ServerFailedError(LoadError):
    """A measured server ended by itself, or was not ready in time. The message has the end of its log."""

    kind = "load_server"


class ScoresDifferError(LoadError):
    """A server's scores are not the expected ones. A figure of wrong answers says nothing."""

    kind = "load_scores"


class HostsError(LoadError):
    """A network namespace, or its link, can't be made or removed: not as this user, or not with this kernel."""

    kind = "compare_hosts"


class NoNetemError(HostsError):
    """The kernel has no netem, so packets can't be delayed."""

    http_status = 501
    grpc_status = "UNIMPLEMENTED"
    kind = "compare_netem"


class CompareStoreError(LoadError):
    """A store's model has other tables or features than the workload's."""

    http_status = 400
    grpc_status = "INVALID_ARGUMENT"
    kind = "compare_store"


class PeerEnvironmentError(LoadError):
    """A peer's virtual environment is not there, or pip could not make it."""

    kind = "peers_environment"
