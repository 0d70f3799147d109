"""Which requests a canary gets: a stable share, chosen by a hash of the request's key.

A key is in the share if its hash is below `share` of the hash's range. So the same key always goes to the same version
while the share is unchanged, in every process of the fleet and over restarts, and a share that grows keeps the keys
that are already in. Why so: docs/decisions/canary-by-request-key.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import xxhash

from serving.errors import CanaryShareError

_RANGE = 1 << 64


@dataclass(frozen=True, slots=True)
class CanaryChoice:
    """The canary of one model. Made by `of`.

    Attributes:
        version: gets the share.
        share: of the requests that do not ask for a version, above 0 and below 1.
        bound: hashes below it are in the share.
    """

    version: int
    share: float
    bound: int

    @classmethod
    def of(cls, version: int, share: float) -> CanaryChoice:
        """Checks a share. Raises CanaryShareError if it is not above 0 and below 1."""
        if not (isfinite(share) and 0.0 < share < 1.0):
            raise CanaryShareError(f"share: {share} is not above 0 and below 1")
        return cls(version, share, int(share * _RANGE))

    def takes(self, model: str, key: str) -> bool:
        """Whether a request with this key goes to the canary."""
        return key_hash(model, key) < self.bound


def key_hash(model: str, key: str) -> int:
    """XXH64 (seed 0) of model, a zero byte, and key, as UTF-8; in 0..2^64 - 1.

    Source of the hash: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md. The model is hashed as well, so
    that two models' canaries are tried on different keys.
    """
    # A lone surrogate is refused when the request is parsed, which is after this.
    return xxhash.xxh64_intdigest(f"{model}\0{key}".encode("utf-8", "surrogatepass"))
