"""`shardrank import`: what another training system saved becomes a version, or a description to fill in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from loader.imports.kinds import Kind
from serving.cli import WithExamples
from serving.cli import options as opts
from serving.cli.export import WHERE, version_options, write_version

if TYPE_CHECKING:
    from loader.stores.cache import StorePlace


@click.command("import", cls=WithExamples)
@click.argument("kind", type=click.Choice(get_args(Kind)))
@click.argument("path", type=opts.EXISTING)
@opts.switch("--describe", "Write a description of what is found into --model, or print it: fill in every TODO.")
@opts.option("--model", "The model's description, JSON.", opts.FILE, name="description")
@opts.store_options(WHERE)
@opts.option("--checkpoint", "What else the model has, as of `export`: dense weights, other tables.", opts.EXISTING)
@opts.choice("--key-dtype", ["int64", "int32", "uint32", "uint64"], "Of tfra's keys, and of those of an old hps.")
@opts.choice("--value-dtype", ["float32", "float16", "bfloat16", "float64"], "Of tfra's values.")
@version_options
def import_(
    kind: Kind, path: Path, describe: bool, description: Path | None, store: StorePlace | None, **options: Any
) -> None:
    r"""Write what another system trained and saved into a store as the model's next version.

    \b
    KIND        PATH
    dynamicemb  what DynamicEmbDump wrote
    tzrec       what TorchEasyRec exported for distributed serving
    torchrec    a state dict or a distributed checkpoint, with ZCH and MPZCH
    hps         folders with key and emb_vector, of HugeCTR and HPS
    tfra        what TensorFlow Recommenders Addons saved to a file system
    numpy       a folder of .npy files: weights of Keras, Merlin, JAX

    Nothing is executed. Rows stream: memory is bounded, and an import that was interrupted goes on where it stopped.
    What is not as the layout says is refused by file and table. docs/coming-from.md has a section for each kind.

    Examples:
      shardrank import dynamicemb dump --describe --model films.json
      shardrank import dynamicemb dump --model films.json --store models --checkpoint dense.pt
      shardrank import numpy weights --model films.json --store models --dense-map names.json \
          --golden-from requests.jsonl --scores scores.npy
    """
    from loader.checkpoints import open_checkpoint
    from loader.imports.kinds import describe as described
    from loader.imports.kinds import open_import

    remainder = options.pop("checkpoint")
    dtypes = {name: options.pop(name) for name in ("key_dtype", "value_dtype")}
    checkpoint = open_import(kind, path, None if remainder is None else open_checkpoint(remainder), **dtypes)
    if not describe:
        if description is None or store is None:
            raise click.UsageError("--model and --store are needed, or --describe.")
        if not description.is_file():
            raise click.UsageError(f"--model: there is no file {str(description)!r}; --describe writes one.")
        write_version(checkpoint, description, store, options)
        return
    text = json.dumps(described(checkpoint, kind, path.resolve().name), indent=2)
    if description is None:
        click.echo(text)
        return
    try:
        with description.open("x", encoding="utf-8") as file:
            file.write(f"{text}\n")
    except FileExistsError:
        raise click.UsageError(
            f"--model: {str(description)!r} is there already; --describe writes a new one."
        ) from None
    for name, number_format in checkpoint.tables.items():
        rows, dim = checkpoint.shape(name)
        click.echo(
            f"{name}: {rows} rows of {dim}, {number_format}{', by key' if checkpoint.keys(name) is not None else ''}"
        )
