"""What each command refuses before it does anything: by exit code, and by what it says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from shardrank_testing.command_line import shardrank
from shardrank_testing.serving_api import MODEL, ApiModel

USAGE, ERROR = 2, 1
NODE = "shard-node --shard 0/1 --listen unix:/tmp/x"
REGISTERED = f"{NODE} --registry r --store s"
SERVE = "serve --registry r --store s"
QUICK = "--once --store s --http-port 0 --grpc-port 0"
PLAN = "plan --model dlrm-v2"
START = "rollout start films 2 --registry r"
# No snapshot, store, node or registry that a line names exists, but {model}, a snapshot's folder.
REFUSALS = [
    ("inspect", USAGE, "Name a snapshot"),
    ("inspect --store a --snapshot b", USAGE, "leave out --store"),
    ("train --store s --keep-share 0.5", USAGE, "--keep-share: only with --prune"),
    ("train --store s --table films=[]", USAGE, "tables.films: "),
    ("train --store s --table films=x", USAGE, "'films=x' is not NAME=JSON."),
    ("train --store s --workers 3", USAGE, "--workers: only with --online"),
    ("train --store s --ratings {model}/manifest.json", USAGE, "--ratings: a file only with --online"),
    ("train --store s --ratings nowhere.csv", USAGE, "'nowhere.csv' is neither a number nor a file."),
    ("train --store s --online", USAGE, "--online needs --folder."),
    ("train --store s --online --folder f --kind dlrm", USAGE, "--kind: not with --online"),
    ("train --store s --online --folder f --consistency ssp", USAGE, "'ssp' is none of bsp, ssp:N"),
    ("train --store s --online --folder f --consistency asp --dense allreduce", USAGE, "waits for all workers in each"),
    ("train --store s --online --folder f --ratings {model}/manifest.json", ERROR, "the first line is '{'"),
    ("demo --sharding sideways", USAGE, "is not one of"),
    (
        f"demo {QUICK} --json nowhere/report.json",
        USAGE,
        "nowhere/report.json: there is no folder 'nowhere'",
    ),
    (f"demo {QUICK} --device tpu", ERROR, "error: device 'tpu' is none of "),
    # Nodes and serving processes.
    ("shard-node --store a --listen b:1 --shard 2/2", USAGE, "'2/2' is not I/N with 0 <= I < N"),
    ("shard-node --store a --listen b:1 --shard x", USAGE, "'x' is not I/N"),
    (f"{NODE} --registry r", USAGE, "--registry needs --store"),
    (f"{NODE} --store s --admin-listen unix:/tmp/y", USAGE, "--admin-listen unix:/tmp/y: HOST:PORT is needed"),
    (f"{REGISTERED} --version 3", USAGE, "--version: not with --registry"),
    (f"{NODE} --store s @max_memory_gb=3", USAGE, "max_memory_gb: only with --registry"),
    (f"{NODE} --store s --model a --model b", USAGE, "Several --model need --registry"),
    (f"{REGISTERED} --node-id a/b", USAGE, "--node-id: String should match"),
    (f"{REGISTERED} --advertise nowhere", ERROR, "address 'nowhere' is none of"),
    (f"{REGISTERED} --model 'a b'", USAGE, "models"),
    ("shard-node --listen unix:/tmp/x --registry r --store {model.parent} --shard 0/2000", USAGE, "num_shards"),
    ("serve --store a --limit max_candidates", USAGE, "'max_candidates' is not NAME=VALUE"),
    ("serve --registry r", USAGE, "--registry needs --store"),
    (f"{SERVE} --version 3", USAGE, "--version: not with --registry"),
    (f"{SERVE} --shard h:1", USAGE, "--shard: not with --registry"),
    (f"{SERVE} --cards 2", USAGE, "--cards: with --registry only for --local rows"),
    (f"{SERVE} --max-staleness films=soon", USAGE, "Input should be a valid number"),
    (f"{SERVE} --model a --max-staleness a=3 --max-staleness b=3", USAGE, "b is not among the --model: ['a']"),
    (f"{SERVE} --max-staleness a=3 --when-stale b=refuse", USAGE, "--max-staleness is only given for ['a']"),
    (f"{SERVE} --max-staleness a=3 --when-stale a=never", USAGE, "should be 'answer', 'other-replica' or 'refuse'"),
    ("serve --snapshot {model} --hot-rows-gb 1", USAGE, "--hot-rows-gb holds copies of rows that are on shard nodes"),
    ("serve --store s --local", USAGE, "--local: only with --registry"),
    ("serve --store s --max-staleness films=3", USAGE, "--max-staleness: only with --registry"),
    ("serve --store s --model a --model b", USAGE, "Several --model need --registry"),
    ("serve --store s --shard h:1 @memory_budget_gb=1", USAGE, "memory_budget_gb: only for rows in this"),
    *(
        (f"{serve} {flag}", USAGE, re.split("[ =]", flag.lstrip("@"))[0] + problem)
        for flag in (
            "--device cuda:0,1",
            "@card_memory_gb=1",
            "--pinned-memory-gb 3",
            "@hot_gb=1",
            "@peer_access='\"required\"'",
        )
        for serve, problem in (
            ("serve --snapshot {model} --shard h:1", ": only for rows in this process"),
            (SERVE, ": with --registry only for --local rows"),
        )
    ),
    *(
        (f"{command} @replica_policy.{name}={value}", USAGE, f"replica_policy: {name}: ")
        for command in ("serve --snapshot {model}", "up --store s")
        for name, value in (("nosuch", 1), ("failures", 0), ("budget_share", 2))
    ),
    ("serve --snapshot {model} --trace-endpoint collector:4317", USAGE, "scheme should be 'http' or 'https'"),
    ("serve --snapshot {model} @trace_protocol='\"grpc\"'", USAGE, "need --trace-endpoint"),
    (
        "serve --snapshot {model} @trace_sample_share=1.5",
        USAGE,
        "trace_sample_share: Input should be less than or equal to 1",
    ),
    # TLS.
    ("serve --store s --tls-cert a", USAGE, "--tls-cert and --tls-key belong together"),
    ("serve --store s --tls-client-ca a", USAGE, "--tls-client-ca needs both"),
    ("serve --store s --node-ca a --node-cert b", USAGE, "--node-cert and --node-key belong together"),
    ("serve --store s --node-cert a --node-key b", USAGE, "--node-cert needs --node-ca or --tls-client-ca"),
    ("up --store s --tls-key a", USAGE, "--tls-cert and --tls-key belong together"),
    (f"{NODE} --store s --tls-cert a", USAGE, "belong together"),
    (f"{NODE} --store s @tls_role='[\"router=urn:a\"]'", USAGE, "--tls-role needs --tls-client-ca or --node-ca"),
    (
        "counts --out f --shard unix:a --node-ca c --tls-role shop=urn:a",
        USAGE,
        "tls_role: ROLE=URI: role_uris.0.0",
    ),
    (
        "counts --out f --shard unix:a --node-ca c --tls-role node=a",
        USAGE,
        "tls_role: ROLE=URI: role_uris.0.1",
    ),
    (
        "counts --out f --shard unix:a --node-cert c --node-key d",
        USAGE,
        "--node-cert needs --node-ca",
    ),
    (
        "counts --out f --shard unix:a --node-cert c",
        USAGE,
        "--node-cert and --node-key belong together",
    ),
    # Flags that are keys of the file, and files.
    (f"{SERVE} --wire-dtype float16", USAGE, "No such option '--wire-dtype'"),
    (f"{NODE} --threads 3", USAGE, "No such option '--threads'"),
    (f"{SERVE} @thread=3 @lunch=1", USAGE, "unknown key 'thread', 'lunch'; allowed are ['registry', 'store'"),
    (f"{SERVE} @http_port=70000", USAGE, "http_port: Input should be less than or equal to 65535"),
    (f"{SERVE} @limits.max_queue=0", USAGE, "limits: max_queue: Input should be greater"),
    (f"{SERVE} @http_port=", USAGE, "settings.toml: Invalid value"),
    (f"{SERVE} --config nowhere", USAGE, "--config nowhere: "),
    (f"{SERVE} --config /dev/zero", USAGE, "--config /dev/zero: more than 1048576 bytes"),
    ("up --store s @serve.lunch=1", USAGE, "serve.lunch: Extra inputs are not permitted"),
    # Counts.
    ("counts --out f", USAGE, "either --registry, or --shard and --server"),
    ("counts --out f --registry r --shard unix:a", USAGE, "either --registry"),
    ("counts --out f --server ftp://a --model m", USAGE, "expected http://"),
    ("counts --out f --server http://a", USAGE, "--server needs --model"),
    ("counts --out f --model m --shard unix:a", USAGE, "--shard needs --version"),
    # Stores and fleets.
    ("publish {model} --store s3://bucket/p", USAGE, "--registry URL is needed: no registry lies in a store"),
    ("publish s3://bucket/p/films --registry r", USAGE, "URL/MODEL/VERSION"),
    ("publish s3://bucket/p/films/1 --store s3://bucket/q --registry r", USAGE, "in another store than s3://bucket/q"),
    ("publish file:///nowhere/films/1 --registry r", ERROR, "store /nowhere: there is no such folder"),
    ("publish {model} --store nosuch", ERROR, "store nosuch: there is no such folder"),
    ("versions", USAGE, "Name the fleet: --registry URL, or --store FOLDER"),
    ("up", USAGE, "Name a store: --store FOLDER|URL"),
    ("up --snapshot {model} --store s", USAGE, "--snapshot names the folder itself: leave out --store"),
    ("token new --scope rank --name 'a b'", USAGE, "--name 'a b': allowed are 1 to 64 letters"),
    ("up --store s3://bucket/p", USAGE, "--registry URL is needed"),
    ("serve --store s3://key:secret@bucket/p", ERROR, "credentials are taken from the environment"),
    ("verify --store s --store-cache-gb 1", USAGE, "--store-cache-gb: only with a --store at a URL"),
    # What is not there.
    *(
        (f"{command} {missing}", ERROR, "nosuch: there is no such ")
        for commands, missing in (
            (("inspect", "verify", "serve", NODE, "up", "coordinator", "versions", "dashboard"), "--store nosuch"),
            (
                ("rollout status films", "rollout start films 2", "rollout abort films", "rollback films"),
                "--store nosuch",
            ),
            (("dashboard", "versions", "counts --out f"), "--registry nosuch"),
            (("serve --registry r", f"{NODE} --registry r"), "--store nosuch"),
            (("inspect", "verify", "serve", NODE, "up", "counts --out f --registry r"), "--snapshot nosuch"),
            (("plan --model", "fit", "publish --registry r"), "nosuch"),
        )
        for command in commands
    ),
    *(
        (f"{command} --store {{model.parent.parent}} {missing}", ERROR, problem)
        for command in ("inspect", "verify", "serve", NODE, "up")
        for missing, problem in (
            (f"--model {MODEL}s", f"has no model '{MODEL}s'; it has ['{MODEL}']"),
            (f"--model {MODEL} --version 7", f"has no version 7 of model '{MODEL}'; it has [1]"),
        )
    ),
    # Rollouts.
    (f"{START} --canary 150%", USAGE, "'150%' is not a share above 0% and below 100%"),
    (f"{START} --bake soon", USAGE, "'soon' is not a time"),
    (f"{START} --bake-timeout 9m", USAGE, "--bake-timeout needs --bake or --canary"),
    (f"{START} --guard max_p99=2", USAGE, "max_p99"),
    (f"{START} --guard max_p99_ratio=0.5", USAGE, "max_p99_ratio"),
    (f"{START} --strategy at-once", USAGE, "at-once"),
    # Plans.
    ("plan", USAGE, "Missing option '--model'"),
    ("plan --model textbook --workers 3", USAGE, "--workers goes with --training"),
    ("plan --model textbook --training", USAGE, "--model does not go with --training"),
    ("plan --training --params 5 --rows 7", USAGE, "workers: Field required; servers: Field required"),
    (
        "plan --system h100 --model merlin-jumbo",
        ERROR,
        "error: rows take 926240048000 bytes, beside 0 of places on each card, "
        f"but cards may take {[80_000_000_000] * 8} "
        "and pinned memory 16000000000: 305240047920 bytes of 1769916779 rows are left over. Give more pinned memory",
    ),
    ("plan --model dlrm-v2:2", ERROR, "above 0 and at most 1"),
    ("plan --model merlin-tiny --out /nowhere/plan.json", USAGE, "/nowhere/plan.json: there is no folder"),
    (f"{PLAN} --hotness f0=many", USAGE, "'f0=many' is not FEATURE=N"),
    (f"{PLAN} --prune", USAGE, "--ids, --prune and --keep-share go with a model description"),
    (f"{PLAN} --head 5000", USAGE, "'5000' is not ROWS:SHARE"),
    ("plan --model dlrm-v2:x", ERROR, "the scale of its rows must be above 0"),
    (f"{PLAN} --hotness nobody=3", ERROR, "has no such feature"),
    (f"{PLAN} --hotness f0=-1", ERROR, "allowed is 0"),
    (f"{PLAN} --hotness f0=nan", ERROR, "allowed is 0"),
    (f"{PLAN} --sharding range --shards 2", ERROR, "is stored with 'mixed'"),
    (f"{PLAN} --shards 1025", USAGE, "1025 is not in the range"),
    (f"{PLAN} --shards 2 --cards 1 --card-memory-gb 4 --pinned-memory-gb 0 --compare", ERROR, "not fit on 2 shards"),
    (f"{PLAN} --system cpu --ram-gb 1 --disk-gb 26", ERROR, "files of 27617242016 bytes, of all shards' rows"),
    (f"{PLAN} --system cpu --card-memory-gb 1", USAGE, "--card-memory-gb does not go with --system cpu"),
    (f"{PLAN} --cards 8 --system a100 --measure", USAGE, "--measure does not go with --system a100"),
    (f"{PLAN} --system z80", USAGE, "is not one of"),
    (f"{PLAN} --card-memory-gb nan", USAGE, "nan is not a finite number"),
    (f"{PLAN} --pinned-memory-gb inf", USAGE, "inf is not a finite number"),
    (f"{PLAN} --network-us nan", USAGE, "nan is not a finite number"),
    (f"{PLAN} --zipf nan", USAGE, "nan is not a finite number"),
    (f"{PLAN} --zipf 9", USAGE, "9.0 is not in the range 0<=x<=8"),
    (f"{PLAN} --zipf -0.1", USAGE, "-0.1 is not in the range"),
]


def words_of(line: str, folder: Path) -> list[str]:
    """Return the words of a line; those that begin with @ are lines of the file of `--config`."""
    words = shlex.split(line)
    if keys := [word[1:] for word in words if word.startswith("@")]:
        (folder / "settings.toml").write_text("\n".join(keys))
        words += ["--config", str(folder / "settings.toml")]
    return [word for word in words if not word.startswith("@")]


@pytest.mark.parametrize(("line", "code", "problem"), REFUSALS, ids=[line for line, *_ in REFUSALS])
def test_a_command_line_is_refused(
    line: str, code: int, problem: str, api_model: ApiModel, folder: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = shardrank(*words_of(line.format(model=api_model.path), folder), code=code)
    assert problem in result.output
    assert "secret" not in result.output
    assert list(tmp_path.iterdir()) == []


def test_a_sampler_of_opentelemetry_is_refused_by_name(api_model, monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_on")
    line = ("serve", "--snapshot", api_model.path, "--trace-endpoint", "http://c:4317")
    assert "OTEL_TRACES_SAMPLER is not read any more" in shardrank(*line, code=USAGE).output
