"""The Python client: NumPy arrays or lists in, scores out, over gRPC or HTTP.

Owns how a product calls a running server: packing in the model's order, connections, deadlines, retries, TLS and
tokens, and errors by the server's kind. It knows the public API and nothing of the server behind it: NumPy, grpcio,
protobuf, httpx and the classes of errors are all that it imports.

```python
with Client("grpc://127.0.0.1:8081") as client:
    result = client.rank("films", {"user_id": 42}, {"film_id": [3, 9]})
```
"""

from __future__ import annotations

from serving.client.client import AsyncClient, Client, RetryPolicy
from serving.results import LookupResult, Ragged, RankResult

__all__ = ["AsyncClient", "Client", "LookupResult", "Ragged", "RankResult", "RetryPolicy"]
