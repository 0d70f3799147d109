"""What the owners of rows answer, in whatever form, adds up to what pooling the whole gives."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from loader.snapshot.codecs import RowCodec
from loader.snapshot.reader import Snapshot
from router.plan import Plan
from shard_node.answer import Answer, ReplyEncoding, add_answers, group_keys, rounded, travel_as_stored
from shard_node.bags import Bags, TableLayout
from shard_node.engine.base import Engine
from shard_node.engine.loading import load_tables
from shard_node.errors import RemoteError
from shard_node.node import LoadedTables, ShardNode
from shard_node.split import Part, split, whole
from shardrank_testing.bags import bags_of
from shardrank_testing.reference import ReferenceEngine
from shardrank_testing.snapshots import model_of, table_of, write_snapshot

NUM_ROWS = 700
SPEC = model_of(
    [
        table_of(f"{dtype}_{dim}_{name}", NUM_ROWS, dim, dtype=dtype)
        for dtype in ("int8", "int4", "fp16", "fp32")
        for dim in (4, 64)
        for name in "ab"
    ]
)
MODEL, VERSION = SPEC.model, 1
LAYOUT = TableLayout.of(SPEC)
EVERY_FORM = [ReplyEncoding(stored, sums) for stored in (False, True) for sums in ("float32", "float16", "int8")]


def node_over(engine: Engine, plan: Plan) -> ShardNode:
    node = ShardNode(plan.identity(0))
    node.generations.stage(MODEL, VERSION, LoadedTables(engine, "identity", plan.digest))
    node.generations.flip(MODEL, VERSION)
    return node


@pytest.fixture(scope="module")
def nodes(tmp_path_factory) -> Iterator[list[ShardNode]]:
    """Nodes that all have all rows: on one card, on three, and half of them left in the files."""
    snapshot = Snapshot.open(write_snapshot(tmp_path_factory.mktemp("store"), SPEC, seed=4, rows_per_file=256)[0])
    nodes = []
    for cards, budget in ((1, None), (3, None), (2, snapshot.float32_bytes // 8)):
        plan = Plan.make(SPEC, cards_per_shard=cards)
        tables = load_tables(snapshot, plan.partition(0), plan.digest, memory_budget_bytes=budget)
        nodes.append(node_over(tables.engine, plan))
    assert {use.tier for use in nodes[2].info().memory} == {"ram", "disk"}
    yield nodes
    for node in nodes:
        node.close()


@st.composite
def table_bags(draw: st.DrawFn, most: int = 6) -> Bags:
    """Bags of some tables, each with at most `most` rows: in some tables one each, in others more, or none."""
    keys = sorted(draw(st.sets(st.integers(0, len(LAYOUT.tables) - 1))))
    lengths = {key: draw(st.lists(st.integers(0, draw(st.sampled_from([1, most]))), max_size=5)) for key in keys}
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    size = sum(map(sum, lengths.values()))
    bags = bags_of_lengths(lengths)
    return bags.with_values(
        rng.integers(0, NUM_ROWS, size), rng.normal(size=size).astype(np.float32) if draw(st.booleans()) else None
    )


def bags_of_lengths(lengths: dict[int, list[int]]) -> Bags:
    """Bags of tables, by their number, with rows 0, 1, 2, and so on."""
    rows = itertools.count()
    return bags_of({table: [list(itertools.islice(rows, n)) for n in of_table] for table, of_table in lengths.items()})


def parts_of(bags: Bags, num_owners: int, seed: int) -> list[Part]:
    if num_owners == 1:
        return [whole(bags)]
    owner = np.random.default_rng(seed).integers(0, num_owners, bags.num_values).astype(np.uint8)
    return split(bags, owner, range(num_owners))


def bags_of_group(part: Part, number: int) -> np.ndarray:
    """Which bags of the whole are those of a part's group."""
    _, first, end = group_keys(LAYOUT, part.bags)[number]
    starts = part.bags.bag_starts()
    return part.bag_index[starts[first] : starts[end]]


def rounding(bags: Bags, parts: list[Part], answers: list[Answer], exact: Engine) -> list[np.ndarray]:
    """How far rounding the sums of parts can take each sum of the whole, [bags, dim] for each group."""
    far = [np.zeros(block.shape) for block in exact.pool(bags)]
    for number, (_, first, _) in enumerate(group_keys(LAYOUT, bags)):
        first_bag = bags.bag_starts()[first]
        for part, answer in zip(parts, answers, strict=True):
            sums = exact.pool(part.bags)[number]
            of_group = bags_of_group(part, number) - first_bag
            if answer.sums[number].dtype == np.float16:
                # Half of the last of 11 bits; below 2^-14 the last bit is 2^-24.
                far[number][of_group] += np.maximum(np.abs(sums) * 2.0**-11, 2.0**-25)
            elif answer.sums[number].dtype == np.uint8 and sums.size:
                # Half of one of 255 steps from the smallest to the largest number.
                far[number][of_group] += np.ptp(sums, axis=1, keepdims=True) / 510 * 1.001
    return far


@given(
    bags=st.sampled_from([1, 6]).flatmap(table_bags),
    num_owners=st.integers(1, 5),
    seed=st.integers(0, 2**32),
    forms=st.lists(st.sampled_from(EVERY_FORM), min_size=5, max_size=5),
    is_narrow=st.booleans(),
)
def test_answers_in_any_forms_add_up_to_the_pooled_batch(nodes, bags, num_owners, seed, forms, is_narrow):
    asked = bags.with_values(bags.values.astype(np.int32), bags.weights) if is_narrow else bags
    parts = parts_of(asked, num_owners, seed)
    answers = [nodes[(part.owner + seed) % 3].answer(MODEL, VERSION, part.bags, forms[part.owner]) for part in parts]
    for part, answer in zip(parts, answers, strict=True):
        answer.check(LAYOUT, part.bags)
        assert (answer.stored is not None) == forms[part.owner].stored
        for group, sums in zip(LAYOUT.groups, answer.sums, strict=True):
            # No int8 row has fewer bytes than float16 sums of up to eight numbers.
            accepted = forms[part.owner].sums
            narrowest = "float16" if accepted == "int8" and group.embedding_dim <= 8 else accepted
            assert not sums.size or sums.dtype == np.dtype("uint8" if narrowest == "int8" else narrowest)
        # Bags of one row travel as stored, without loss.
        if forms[part.owner].stored and part.bags.lengths.max(initial=0) <= 1:
            assert sum(answer.bytes_by_form()[1:]) == 0
        assert sum(answer.bytes_by_form()) <= LAYOUT.answer_bytes(
            part.bags.keys, part.bags.bags_per_key, part.bags.num_bags
        )
    exact = nodes[0].generations.payload(MODEL, VERSION).engine
    expected = exact.pool(bags)
    far = rounding(bags, parts, answers, exact)
    for number, block in enumerate(add_answers(LAYOUT, bags, parts, answers)):
        assert block.dtype == np.float32
        assert block.shape == expected[number].shape
        assert (np.abs(block - expected[number]) <= far[number] + 1e-4).all()
        if all(not answer.sums[number].size for answer in answers):
            # Pooled by the operator that pools rows in memory, in the order of the values.
            assert block.tobytes() == expected[number].tobytes()


@pytest.mark.parametrize(
    "lengths", [{0: [0, 0], 1: [40]}, {0: [40], 1: [0, 0]}, {0: [0], 1: []}, {0: [0, 0, 0], 15: [40, 40]}]
)
@pytest.mark.parametrize("num_owners", [0, 1, 3])
def test_empty_bags_are_zeros_in_every_form(nodes, lengths, num_owners):
    """Bags of other tables are divided over the owners, so that some are known to share bags."""
    bags = bags_of_lengths(lengths)
    if not num_owners:
        bags = bags_of_lengths({table: [0] * len(of_table) for table, of_table in lengths.items()})
    owner = (np.arange(bags.num_values) % max(1, num_owners)).astype(np.uint8)
    parts = split(bags, owner, range(num_owners)) if num_owners else []
    answers = [nodes[0].answer(MODEL, VERSION, part.bags, ReplyEncoding(stored=True)) for part in parts]
    added = add_answers(LAYOUT, bags, parts, answers)
    for actual, expected in zip(added, nodes[0].pool(MODEL, VERSION, bags), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


EDGES = [0.0, -0.0, 65504.0, -65504.0, 65519.996, 65520.0, -65520.0, 1e-8, np.inf, -np.inf, np.nan]
SHAPES = hnp.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=9)


def test_int8_sums_are_the_rows_that_the_codec_stores():
    sums = np.random.default_rng(3).normal(size=(50, 9)).astype(np.float32)
    assert rounded(sums, "int8").tobytes() == RowCodec("int8", 9).encode(sums).tobytes()
    sums[7, 2] = 3.4e38
    # The numbers of one row are finite, their range is not.
    sums[7, 3] = -3.4e38
    assert rounded(sums, "int8") is sums
    sums[7, 2:4] = 9000.0, -9000.0
    assert rounded(sums[:, :8].copy(), "int8").dtype == np.float16


@given(hnp.arrays(np.float32, SHAPES, elements=st.floats(-70_000, 70_000, width=32) | st.sampled_from(EDGES)))
def test_sums_are_rounded_unless_one_is_too_large(sums):
    before = sums.tobytes()
    assert rounded(sums, "float32") is sums
    answered = rounded(sums, "float16")
    with np.errstate(over="ignore"):
        expected = sums.astype(np.float16)
    if sums.size and np.isfinite(expected).all():
        assert answered.dtype == np.float16
        assert answered.tobytes() == expected.tobytes()
    else:
        assert answered is sums
    assert sums.tobytes() == before


def test_sums_too_large_for_float16_travel_in_float32():
    rows = {table.name: np.full((NUM_ROWS, table.embedding_dim), 40_000.0, np.float32) for table in LAYOUT.tables}
    node = node_over(ReferenceEngine(SPEC, rows), Plan.make(SPEC))
    first, last = 0, len(LAYOUT.tables) - 1
    bags = bags_of_lengths({first: [1, 2], last: [1, 1]})
    answer = node.answer(MODEL, VERSION, bags, ReplyEncoding(sums="float16"))
    assert answer.sums[0].dtype == np.float32
    assert answer.sums[-1].dtype == np.float16
    # Another part of the same group, with smaller sums, may be in float16 beside it.
    parts = split(bags, np.array([0, 0, 1, 1, 0], np.uint8), range(2))
    answers = [node.answer(MODEL, VERSION, part.bags, ReplyEncoding(sums="float16")) for part in parts]
    assert {one.sums[0].dtype for one in answers} == {np.dtype(np.float16)}
    added = add_answers(LAYOUT, bags, parts, answers)
    assert added[0].tolist() == [[40_000.0] * 4, [80_000.0] * 4]
    assert added[-1].tolist() == [[40_000.0] * 64] * 2
    parts = split(bags, np.array([1, 0, 0, 1, 0], np.uint8), range(2))
    answers = [node.answer(MODEL, VERSION, part.bags, ReplyEncoding(sums="float16")) for part in parts]
    assert [one.sums[0].dtype for one in answers] == [np.float32, np.float16]
    assert add_answers(LAYOUT, bags, parts, answers)[0].tolist() == [[40_000.0] * 4, [80_000.0] * 4]


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 200)), max_size=6), st.sampled_from(LAYOUT.groups))
def test_rows_travel_as_stored_where_that_is_shorter(counts, group):
    values, bags = (np.array([one[which] for one in counts], np.int64) for which in (0, 1))
    for (num_values, num_bags), is_stored in zip(counts, travel_as_stored(group, values, bags), strict=True):
        sums_bytes = num_bags * 2 * group.embedding_dim
        assert is_stored == (num_values * group.row_bytes <= sums_bytes or num_values <= num_bags)


@given(
    bags=table_bags(), others=table_bags(), forms=st.sampled_from(EVERY_FORM), other_forms=st.sampled_from(EVERY_FORM)
)
def test_an_answer_of_other_shapes_is_refused(nodes, bags, others, forms, other_forms):
    expected = nodes[0].answer(MODEL, VERSION, bags, forms)
    other = nodes[0].answer(MODEL, VERSION, others, other_forms)

    def shapes(answer: Answer) -> list[tuple[int, ...]]:
        # Int8 sums have a scale and a bias more.
        sums = [(len(one), one.shape[1] - 8 * (one.dtype == np.uint8)) for one in answer.sums]
        return sums + [rows.shape for rows in answer.stored or ()]

    expected.check(LAYOUT, bags)
    if forms.stored != other_forms.stored:
        return
    if shapes(expected) == shapes(other):
        other.check(LAYOUT, bags)
    else:
        with pytest.raises(RemoteError, match=r"the answer's (sums|stored rows) of group \d are \[\d+, \d+\], not"):
            other.check(LAYOUT, bags)
    with pytest.raises(RemoteError, match="the answer has sums of 7 groups, the model has 8"):
        Answer(expected.sums[:-1], expected.stored).check(LAYOUT, bags)
    if forms.stored:
        with pytest.raises(RemoteError, match="the answer has stored rows of 9 groups, the model has 8"):
            Answer(expected.sums, [*expected.stored, expected.stored[0]]).check(LAYOUT, bags)
