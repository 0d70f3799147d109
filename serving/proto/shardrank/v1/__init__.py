"""Protobuf package `shardrank.v1`: generated modules, see `serving.proto`."""
