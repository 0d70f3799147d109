"""Protobuf package `shardrank`."""
