"""`trinity index build | info | verify | …` and `trinity search`: collections from the command line.

Errors are raised as `TrinityError` or `GpuError`, which `launchers.main` prints as one line.
"""

import contextlib
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer

from gpu.index.storage import CODE_FILES
from gpu.params import MAX_SEARCH_WIDTH, MAX_TOP_M
from launchers.commands import writes
from launchers.commands.embedding_device import BuildDevice, load_for_documents, load_on
from launchers.commands.follow import follow
from launchers.commands.writes import Directory
from launchers.progress import BuildProgress
from runtime.errors import BuildRefused, CollectionError, UsageError
from runtime.node.run_dir import find_node
from runtime.node.supervisor.admin import reload_collections
from runtime.retrieval.collections import bulk_load
from runtime.retrieval.collections.description import DOCUMENTS, INDEX, KEYWORDS
from runtime.retrieval.collections.log import log_bytes
from runtime.retrieval.collections.reader import CollectionReader
from runtime.retrieval.collections.writer import CollectionWriter
from runtime.retrieval.embedding.embedder import DirectorySpec, EmbedderSpec, embedder_name
from runtime.retrieval.embedding.loading import DEFAULT_EMBEDDER, EmbedderLocation, choose_embedder
from runtime.retrieval.ingestion.build_inputs import read_ids, read_source, read_truth, read_vectors
from runtime.retrieval.ingestion.ingest import IngestReport, ingest
from runtime.retrieval.ingestion.ingest import add as update
from runtime.retrieval.ingestion.readers import SUFFIXES
from runtime.retrieval.neighbors import recall

index_app = typer.Typer(help="Build and check collections: an index and its documents.", no_args_is_help=True)
index_app.command()(follow)
for command in (writes.upsert, writes.delete, writes.flush, writes.compact, writes.query):
    index_app.command()(command)


@index_app.command()
def build(
    *,
    sources: Annotated[
        list[Path] | None,
        typer.Argument(
            readable=False,
            help=f"Folders and files ({', '.join(SUFFIXES)}), .jsonl or .jsonl.gz (id, text, title), or .npy vectors. "
            "None: an empty collection.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The collection's new directory.")],
    metric: Annotated[Literal["cosine", "l2", "ip"], typer.Option(help="Distance metric.")] = "cosine",
    passage_tokens: Annotated[
        int, typer.Option(help="Maximum tokens of a passage of a file. 0: 192, or the embedder's limit.")
    ] = 0,
    embedder: Annotated[
        str | None,
        typer.Option(
            help=f"The embedder of texts: {DEFAULT_EMBEDDER} (the default), hashing-D, a directory with a "
            "sentence-transformers model in ONNX format, or the URL of a server with OpenAI's /v1/embeddings. For "
            "vectors: the embedder that made them, so that queries may be texts.",
            show_default=False,
        ),
    ] = None,
    embedder_model: Annotated[str, typer.Option(help="Model name, if the embedder is a server.")] = "",
    embedder_key_file: Annotated[str, typer.Option(help="File with the API key, if the embedder is a server.")] = "",
    query_prefix: Annotated[
        str | None, typer.Option(help="Prefix of each query. Default: from the model's files.")
    ] = None,
    passage_prefix: Annotated[
        str | None, typer.Option(help="Prefix of each passage. Default: from the model's files.")
    ] = None,
    vectors: Annotated[
        Path | None, typer.Option(help="Precomputed vectors of the texts: .npy, one row per text.")
    ] = None,
    ids: Annotated[
        Path | None, typer.Option(readable=False, help="Ids of .npy vectors: .npy integers. Default: row numbers.")
    ] = None,
    dim: Annotated[int, typer.Option(help="Dimensions of the vectors, of an empty collection without embedder.")] = 0,
    demand: Annotated[str, typer.Option(help="An attribute that the filter of every search must bind.")] = "",
    attribute: Annotated[
        list[str] | None, typer.Option(help="An attribute and its type, such as year=integer; may be repeated.")
    ] = None,
    degree: Annotated[int, typer.Option(help="Edges per node of the graph, 2 to 512.")] = 32,
    dtype: Annotated[
        Literal["float32", "float16"],
        typer.Option(help="Type of stored vectors."),
    ] = "float32",
    neighbor_codes: Annotated[
        bool,
        typer.Option(help="Store neighbour codes: faster on CPUs, larger."),
    ] = True,
    code_bits: Annotated[
        int, typer.Option(help="Bits per dimension of neighbour codes, 1 or 2. 0: 2 up to 256 dimensions, else 1.")
    ] = 0,
    shards: Annotated[int, typer.Option(help="Number of shards, one per pool worker, 1 to 8.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the graph's random choices, from 0.")] = 0,
    threads: Annotated[int, typer.Option(help="Cores to use, up to 1024; 0: all that this process may use.")] = 0,
    device: BuildDevice = "cpu",
    force: Annotated[bool, typer.Option("--force", help="Replace an existing collection.")] = False,
) -> None:
    """Build a collection. It appears at --out atomically, when it is complete. Documents can be added and deleted."""
    begin = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: removes the incomplete build
    threads = threads or len(os.sched_getaffinity(0))
    options: dict[str, Any] = {
        "metric": metric,
        "degree": degree,
        "dtype": dtype,
        "neighbor_codes": neighbor_codes,
        "code_bits": code_bits,
        "shards": shards,
        "seed": seed,
        "threads": threads,
        "device": device,
        "force": force,
        "demanded": demand or None,
        "schema": dict(writes.declared(one) for one in attribute or ()),
    }
    if not sources or dim:
        _build_empty(sources, out, dim, embedder or "", embedder_model, embedder_key_file, options)
        return
    given = vectors is not None or any(source.name.endswith(".npy") for source in sources)
    if given and len(sources) > 1:
        raise BuildRefused(f"vectors require exactly one source, not {len(sources)}")
    if not given and ids is not None:
        raise BuildRefused("documents have their own ids: give ids only with bare vectors")
    chosen = None
    if embedder is not None or not given:
        chosen = load_on(
            "cpu" if given else device,
            lambda at: choose_embedder(
                embedder or DEFAULT_EMBEDDER,
                model=embedder_model,
                key_file=embedder_key_file,
                query_prefix=query_prefix,
                passage_prefix=passage_prefix,
                device=at,
            ),
        )
    ingested = IngestReport()
    with BuildProgress(sys.stderr) as progress:
        if given or chosen is None:
            spec, model = chosen or (None, None)
            bulk_load.build(
                read_source(sources[0], progress),
                out,
                embedder=spec,
                model=model,
                vectors=None if vectors is None else read_vectors(vectors),
                ids=None if ids is None else read_ids(ids),
                progress=progress,
                **options,
            )
        else:
            ingested = ingest(sources, out, *chosen, passage_tokens=passage_tokens, progress=progress, **options)
    _print_built(out, ingested, begin)


@index_app.command()
def add(
    sources: Annotated[
        list[Path],
        typer.Argument(readable=False, help=f"Folders and files ({', '.join(SUFFIXES)}), .jsonl or .jsonl.gz."),
    ],
    out: Annotated[Path, typer.Option(help="The collection's directory.")],
    embedder_at: Annotated[str, typer.Option(help="The directory or URL of its embedder, if it has moved.")] = "",
    embedder_key_file: Annotated[str, typer.Option(help="File with the API key, if the embedder is a server.")] = "",
    threads: Annotated[int, typer.Option(help="Cores to use, up to 1024; 0: all that this process may use.")] = 0,
    device: BuildDevice = "cpu",
) -> None:
    """Update a collection from files: only new and changed files are read and embedded; removed ones are deleted."""
    begin = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: removes the incomplete build
    with BuildProgress(sys.stderr) as progress:
        load = partial(load_for_documents, device=device, location=EmbedderLocation(embedder_at, embedder_key_file))
        threads = threads or len(os.sched_getaffinity(0))
        ingested = update(sources, out, load=load, threads=threads, device=device, progress=progress)
    print(
        f"{ingested.read:,} files new or changed, {ingested.gone:,} gone, {ingested.unchanged:,} unchanged; "
        f"{ingested.embedded:,} passages embedded"
    )
    if ingested.changed:
        _print_built(out, ingested, begin)
    else:
        _print_skipped(ingested)
        print(f"{out}: nothing changed")


def _build_empty(
    sources: list[Path] | None, out: Path, dim: int, embedder: str, model: str, key_file: str, options: dict[str, Any]
) -> None:
    if sources:
        raise BuildRefused("dim is of an empty collection: sources have vectors, or an embedder")
    if embedder and dim:
        raise BuildRefused("give --embedder or --dim, not both")
    spec = None
    if not dim:
        spec, loaded = choose_embedder(embedder or DEFAULT_EMBEDDER, model=model, key_file=key_file)
        dim = loaded.dim
    names = ("metric", "dtype", "degree", "demanded", "schema", "shards")
    bulk_load.create(out, dim, embedder=spec, **{name: options[name] for name in names})
    print(f"{out}: an empty collection of vectors of {dim} dimensions")


def _print_built(out: Path, ingested: IngestReport, begin: float) -> None:
    _print_skipped(ingested)
    with CollectionReader(out) as built:
        size, dim = built.state.count, built.description.dim
    print(f"{out}: {size:,} vectors of {dim} dimensions, built in {time.monotonic() - begin:.1f} s")


def _print_skipped(ingested: IngestReport) -> None:
    """Print every file that could not be read, and their number."""
    for path, reason in ingested.skipped.items():
        shown = path if path.isprintable() else ascii(path)  # a name may contain line feeds and terminal escapes
        print(f"skipped {shown}: {reason}", file=sys.stderr)
    if ingested.skipped:
        print(f"{len(ingested.skipped):,} files could not be read and were skipped", file=sys.stderr)


def _describe(embedder: EmbedderSpec | None) -> str:
    """Describe an embedder, with its location when the collection was built."""
    if embedder is None or isinstance(embedder, str):
        return embedder or "none: queries must be vectors"
    origin = embedder.directory if isinstance(embedder, DirectorySpec) else embedder.url
    prefixes = f"prefixes {embedder.query_prefix!r} of queries, {embedder.passage_prefix!r} of passages"
    return f"{embedder_name(embedder)}, of {origin}; {prefixes}"


@index_app.command()
def reload(
    node: Annotated[str, typer.Argument(help="The node's name, or its run directory.")],
    collection: Annotated[str, typer.Argument(help="The collection's name in the node. Default: all.")] = "",
    timeout: Annotated[float, typer.Option(help="Seconds to wait for all pool workers to serve it.")] = 1800.0,
) -> None:
    """Make a running node serve a rebuilt collection, without downtime. Damaged builds are rejected."""
    done = reload_collections(find_node(node), collection, timeout)
    print(f"{collection or 'every collection'} reloaded by {', '.join(done) or 'no worker: none runs'}")


@index_app.command()
def info(directory: Directory) -> None:
    """Describe a collection."""
    with CollectionReader(directory) as collection:
        _print_described(collection)


def _print_described(collection: CollectionReader) -> None:
    about, state = collection.description, collection.state
    codes = sum(state.file_bytes(f"{INDEX}/{name}") for name in CODE_FILES)
    sizes = {name: f"yes, {size / 1e6:,.1f} MB" if size else "no" for name, size in (
        ("documents", state.file_bytes(DOCUMENTS)), ("keyword index", state.file_bytes(KEYWORDS)),
    )}  # fmt: skip
    for name, value in {
        "vectors": f"{collection.state.count:,}",
        "dimensions": about.dim,
        "metric": about.metric,
        "dtype": about.dtype,
        "degree": about.degree,
        "shards": about.shards,
        "segments": ", ".join(f"{one.info.number}: {one.size:,}" for one in state.segments) or "none",
        "tombstones": f"{sum(one.size - one.count for one in state.segments):,}",
        "log": f"{state.growing.size:,} rows, {log_bytes(collection.directory) / 1e6:,.1f} MB",
        "index": f"{state.file_bytes(INDEX) / 1e6:,.1f} MB, of which neighbour codes {codes / 1e6:,.1f} MB",
        **sizes,
        "attributes": ", ".join(f"{name} ({kind})" for name, kind in sorted(state.schema.items())) or "none",
        "demanded": about.demanded or "none",
        "embedder": _describe(collection.embedder),
    }.items():
        print(f"{name:13} {value}")
    if torn_bytes := collection.log.torn_bytes:
        print(f"the last {torn_bytes} bytes of the log are an incomplete record; the next writer cuts them")


@index_app.command()
def verify(directory: Directory) -> None:
    """Verify the checksum of every file of a collection."""
    torn = CollectionReader.verify(directory)
    print(f"{directory}: every checksum is correct")
    if torn:
        print(torn)


@index_app.command()
def upgrade(directory: Directory) -> None:
    """Convert a collection of an earlier version, as the first write to it does."""
    CollectionWriter(directory, background=False).close()
    print(f"{directory}: it has the present format")


def search(
    directory: Directory,
    queries: Annotated[Path, typer.Option(readable=False, help="Query vectors: .npy, one row a query.")],
    k: Annotated[int, typer.Option(help="Nearest vectors to find.")] = 10,
    out: Annotated[Path | None, typer.Option(help="Output file of the ids: .npy of int64, k for each query.")] = None,
    truth: Annotated[
        Path | None, typer.Option(readable=False, help="The true ids: .npy, at least k for each query, nearest first.")
    ] = None,
    top_m: Annotated[
        int | None, typer.Option(help="Candidate list length; more raises recall and time. Default: 64, or k.")
    ] = None,
    search_width: Annotated[int, typer.Option(help="Parents expanded in each extend.")] = 1,
    patience: Annotated[int | None, typer.Option(help="Stop after this many extends without a change.")] = None,
    threads: Annotated[int, typer.Option(help="Cores to use.", min=1)] = 1,
) -> None:
    """Search a collection for a batch of vectors; print queries per second, and recall if the truth is given."""
    if top_m is not None:
        _check("--top-m", top_m, MAX_TOP_M)
    _check("--k", k, top_m or MAX_TOP_M)
    list_length = top_m or max(64, k)
    _check("--search-width", search_width, MAX_SEARCH_WIDTH)
    vectors = read_vectors(queries)
    true_ids = None if truth is None else read_truth(truth, len(vectors), k)
    with CollectionReader(directory) as collection:
        if vectors.shape[1] != (dim := collection.description.dim):
            raise CollectionError(
                f"{queries}: its vectors have {vectors.shape[1]} dimensions, those of {directory} {dim}"
            )
        # The first search compiles or loads machine code, and is excluded from the measurement.
        collection.search(vectors[:1], k, list_length, search_width, patience, threads)
        begin = time.perf_counter()
        ids, _ = collection.search(vectors, k, list_length, search_width, patience, threads)
        seconds = time.perf_counter() - begin
    if out is not None:
        _write(out, ids)
    reached = "" if true_ids is None else f", recall@{k} {recall(ids, true_ids):.4f}"
    print(f"{len(vectors):,} queries in {seconds:.3f} s: {len(vectors) / seconds:,.0f} queries/s{reached}")


def _check(option: str, value: int, high: int) -> None:
    if not 1 <= value <= high:
        raise UsageError(f"{option} is {value}, outside 1..{high}")


def _write(out: Path, ids: np.ndarray) -> None:
    """Write a file atomically."""
    part = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with part.open("wb") as file:
            np.save(file, ids)
        part.replace(out)
    except OSError as error:
        raise CollectionError(f"{out} cannot be written: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
