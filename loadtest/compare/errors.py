"""The comparison's branch of the error tree.

```
ShardrankError
└── CompareError                500 INTERNAL             a comparison that can't be run to its end
    ├── ArmServerError                                   an arm's server ended, or did not get ready
    ├── ArmsDisagreeError                                arms whose scores of the same request differ
    ├── HostsError                                       network namespaces or links can't be made or removed
    │   └── NoNetemError    501 UNIMPLEMENTED            a kernel that can't delay packets
    └── CompareStoreError       400 INVALID_ARGUMENT     a store that holds another model of that name
```
"""

from __future__ import annotations

from loader.errors import ShardrankError


class CompareError(ShardrankError):
    """A comparison can't be run to its end. A run that can't be believed is no error but its result."""

    kind = "compare"


class ArmServerError(CompareError):
    """The server of an arm ended by itself, or was not ready in time. The message has the end of its log."""

    kind = "compare_server"


class ArmsDisagreeError(CompareError):
    """An arm's scores are not the first one's. A ratio of wrong answers to right ones says nothing."""

    kind = "compare_scores"


class HostsError(CompareError):
    """A network namespace, or its link, can't be made or removed: not as this user, or not with this kernel."""

    kind = "compare_hosts"


class NoNetemError(HostsError):
    """The kernel has no netem, so packets can't be delayed."""

    http_status = 501
    grpc_status = "UNIMPLEMENTED"
    kind = "compare_netem"


class CompareStoreError(CompareError):
    """A store's model has other tables or features than the workload's."""

    http_status = 400
    grpc_status = "INVALID_ARGUMENT"
    kind = "compare_store"
