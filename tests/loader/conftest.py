"""A snapshot to damage."""

from __future__ import annotations

import shutil

import pytest

from loader.snapshot.tables import VocabularyMapping
from shardrank_testing.snapshots import make_spec, random_golden, write_snapshot


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """A snapshot with every kind of file: rows, vocabulary, dense, golden, manifest, checksum."""
    spec = make_spec()
    film = spec.tables[1].model_copy(update={"id_mapping": VocabularyMapping(id_type="string")})
    spec = spec.model_copy(update={"tables": (spec.tables[0], film, *spec.tables[2:])})
    path, _ = write_snapshot(
        tmp_path_factory.mktemp("store"),
        spec,
        vocabularies={"film": [f"tt{number}" for number in range(700)]},
        golden=random_golden(spec, seed=1),
        rows_per_file=512,
    )
    return path


@pytest.fixture
def copy(pristine, tmp_path):
    return shutil.copytree(pristine, tmp_path / "films" / "1")
