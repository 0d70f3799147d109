"""Stores at URLs: snapshots in S3, Google Cloud Storage or Azure Blob Storage, read through a local cache.

A version is fetched into the cache, checked against its manifest, and then read as a local one. This package knows
`loader.snapshot`; nothing in it but `place` and `opening` is imported by who has a store in a folder.
"""
