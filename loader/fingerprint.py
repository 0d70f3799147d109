"""String ids as numbers: a 63-bit fingerprint that is a valid id everywhere an integer id is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

_ID_MASK = (1 << 63) - 1


def fingerprint_strings(strings: Sequence[str]) -> npt.NDArray[np.int64]:
    """XXH3-64 (seed 0) of each string's UTF-8 bytes with the top bit cleared, int64 [len(strings)].

    Source of the hash: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md.
    """
    digest = xxhash.xxh3_64_intdigest
    return np.fromiter((digest(text.encode()) & _ID_MASK for text in strings), np.int64, count=len(strings))
