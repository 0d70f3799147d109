"""Stores at URLs: snapshots in S3, Google Cloud Storage or Azure Blob Storage, read through a local cache."""

from __future__ import annotations

from pathlib import Path

from loader.snapshot.store import Store
from loader.stores.cache import StoreUrl, store_place


def open_store(address: str | Path | StoreUrl) -> Store:
    """Open a store; nothing is asked or written yet. Raises StoreError as `store_place`, and for a missing package."""
    address = store_place(address)
    if isinstance(address, Path):
        return Store(address)
    # Only processes that use it import the client.
    from loader.stores.remote import RemoteStore

    return RemoteStore(address)
