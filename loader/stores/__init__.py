"""Stores at URLs: snapshots in S3, Google Cloud Storage or Azure Blob Storage, read through a local cache.

A version is fetched into the cache, checked against its manifest, and then read as a local one. This package knows
`loader.snapshot`; a store in a folder imports nothing of it but `open_store` and `place`.
"""

from __future__ import annotations

from pathlib import Path

from loader.snapshot.store import Store
from loader.stores.place import StoreUrl, store_place


def open_store(place: str | Path | StoreUrl) -> Store:
    """Open a store, wherever it is. Nothing is asked or written yet.

    Raises StoreUrlError as `store_place`, and if what a URL takes is not installed or not set.
    """
    place = store_place(place)
    if isinstance(place, Path):
        return Store(place)
    # Only who uses it pays for its import, and needs what it imports.
    from loader.stores.remote import RemoteStore

    return RemoteStore(place)
