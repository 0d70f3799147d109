from __future__ import annotations

import ctypes

from hypothesis import given
from hypothesis import strategies as st

from shard_node.cuda.kernel_arguments import MAX_PARAMETER_BYTES, pointers_to
from shard_node.cuda.kernel_params import ArenaParams, BatchParams, WriteParams

KINDS = (ArenaParams, BatchParams, WriteParams)


@given(st.lists(st.sampled_from(KINDS).flatmap(lambda kind: st.tuples(st.just(kind), st.randoms())), max_size=5))
def test_a_launch_finds_every_structure_behind_its_pointer(drawn):
    params = [kind.from_buffer_copy(random.randbytes(ctypes.sizeof(kind))) for kind, random in drawn]
    pointers = pointers_to(params)
    # As cuLaunchKernel reads them: an array of void *, without its length.
    found = ctypes.cast(ctypes.addressof(pointers), ctypes.POINTER(ctypes.c_void_p)) if params else []
    assert [ctypes.string_at(found[i], ctypes.sizeof(one)) for i, one in enumerate(params)] == list(map(bytes, params))


def test_the_parameters_of_every_kernel_fit_a_launch():
    for kinds in ((ArenaParams, BatchParams), (ArenaParams, WriteParams)):
        assert sum(map(ctypes.sizeof, kinds)) <= MAX_PARAMETER_BYTES
