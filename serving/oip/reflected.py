"""What gRPC reflection looks services up in: those of the default descriptor pool, and the inference protocol's own."""

from __future__ import annotations

from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from serving.proto.inference import open_inference_pb2
from serving.proto.shardrank.v1 import ranking_pb2


def reflected_services() -> tuple[list[str], DescriptorPool]:
    """Names of all services that a serving process has, and one pool that knows them all."""
    pool, names = DescriptorPool(), []
    for module in (ranking_pb2, open_inference_pb2, health_pb2, reflection_pb2):
        pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
        names += [service.full_name for service in module.DESCRIPTOR.services_by_name.values()]
    return names, pool
