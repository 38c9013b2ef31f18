"""`trinity index build | info | verify | …` and `trinity search`: collections from the command line.

What is wrong with the input is raised as `TrinityError` (or `GpuError`) and becomes one line in `launchers.main`.
"""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer

from gpu.params import MAX_SEARCH_WIDTH, MAX_TOP_M
from launchers.commands.follow import follow
from launchers.commands.live import compact, show_info, show_verified
from launchers.progress import BuildProgress
from runtime.errors import BuildRefused, CollectionError, UsageError
from runtime.node.placement.plan import nodes_dir
from runtime.node.run_dir import collection_paths, find_node, running_nodes
from runtime.node.supervisor.admin import reload_collections
from runtime.retrieval.collections.collection import Collection
from runtime.retrieval.collections.sources import read_truth, read_vectors
from runtime.retrieval.embedding.embedder import DirectorySpec, EmbedderSpec, embedder_name
from runtime.retrieval.embedding.loading import DEFAULT_EMBEDDER, EmbedderLocation, choose_embedder
from runtime.retrieval.ingestion.ingest import IngestReport, ingest
from runtime.retrieval.ingestion.ingest import add as update
from runtime.retrieval.ingestion.readers import SUFFIXES
from runtime.retrieval.live.storage.manifest import is_live
from runtime.retrieval.neighbors import recall

index_app = typer.Typer(help="Build and check collections: an index and its documents.", no_args_is_help=True)
index_app.command()(follow)
index_app.command()(compact)

Directory = Annotated[Path, typer.Argument(help="A collection's directory.")]


@index_app.command()
def build(
    sources: Annotated[
        list[Path],
        typer.Argument(
            help=f"Folders and files ({', '.join(SUFFIXES)}), .jsonl or .jsonl.gz (id, text, title), or .npy vectors."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The directory to make.")],
    metric: Annotated[Literal["cosine", "l2", "ip"], typer.Option(help="What near means.")] = "cosine",
    passage_tokens: Annotated[
        int, typer.Option(help="Of a passage of a file at most. 0: 192, or what the embedder reads.")
    ] = 0,
    embedder: Annotated[
        str | None,
        typer.Option(
            help=f"What turns texts into vectors: {DEFAULT_EMBEDDER} (the default for texts), hashing-D, a directory "
            "with a sentence-transformers model in ONNX form, or the URL of a server with OpenAI's /v1/embeddings. "
            "With vectors: what they came from, so that queries may be texts.",
            show_default=False,
        ),
    ] = None,
    embedder_model: Annotated[str, typer.Option(help="Of a server: what it calls the embedder.")] = "",
    embedder_key_file: Annotated[str, typer.Option(help="Of a server: a file with its key.")] = "",
    query_prefix: Annotated[
        str | None, typer.Option(help="What stands before each query; else what the model's files say.")
    ] = None,
    passage_prefix: Annotated[
        str | None, typer.Option(help="What stands before each passage; else what the model's files say.")
    ] = None,
    vectors: Annotated[
        Path | None, typer.Option(help="The texts' vectors, if known already: .npy, a row a text.")
    ] = None,
    ids: Annotated[Path | None, typer.Option(help="Ids of .npy vectors: .npy of integers. Else: row numbers.")] = None,
    degree: Annotated[int, typer.Option(help="Edges a node of the graph, 2 to 512.")] = 32,
    dtype: Annotated[
        Literal["float32", "float16", "int8"], typer.Option(help="How vectors are kept; int8 keeps float32 beside.")
    ] = "float32",
    neighbor_codes: Annotated[
        bool | None,
        typer.Option(
            help="Keep codes of neighbours: faster on CPUs, larger. Default: yes, but not with int8.",
            show_default=False,
        ),
    ] = None,
    code_bits: Annotated[
        int, typer.Option(help="Of such a code for each dimension, 1 to 4; 0: 2 up to 256 dimensions, else 1.")
    ] = 0,
    shards: Annotated[int, typer.Option(help="Split it over so many pool workers, 1 to 8.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the graph's random choices, from 0.")] = 0,
    threads: Annotated[int, typer.Option(help="Cores to use, up to 1024; 0: all that this process may use.")] = 0,
    device: Annotated[
        Literal["cpu", "cuda"], typer.Option(help="What builds the graph; cuda: cuVS, of the extra \\[cuvs], or torch.")
    ] = "cpu",
    force: Annotated[bool, typer.Option("--force", help="Replace the collection that is there.")] = False,
) -> None:
    """Build a collection. It appears at --out when it is complete, or not at all."""
    begin = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what is half built is removed
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
    }
    given = vectors is not None or any(source.name.endswith(".npy") for source in sources)
    if given and len(sources) > 1:
        raise BuildRefused(f"vectors go with one source, not with {len(sources)}")
    if not given and ids is not None:
        raise BuildRefused("documents have their own ids: give ids only with bare vectors")
    chosen = None
    if embedder is not None or not given:
        chosen = choose_embedder(
            embedder or DEFAULT_EMBEDDER,
            model=embedder_model,
            key_file=embedder_key_file,
            query_prefix=query_prefix,
            passage_prefix=passage_prefix,
            threads=max(threads, 1),
        )
    ingested = IngestReport()
    with BuildProgress(sys.stderr) as progress:
        if given or chosen is None:
            spec, model = chosen or (None, None)
            Collection.build(
                sources[0], out, embedder=spec, model=model, vectors=vectors, ids=ids, progress=progress, **options
            )
        else:
            ingested = ingest(sources, out, *chosen, passage_tokens=passage_tokens, progress=progress, **options)
    _tell(out, ingested, begin)


@index_app.command()
def add(
    sources: Annotated[
        list[Path], typer.Argument(help=f"Folders and files ({', '.join(SUFFIXES)}), .jsonl or .jsonl.gz.")
    ],
    out: Annotated[Path, typer.Option(help="The collection's directory.")],
    embedder_at: Annotated[
        str, typer.Option(help="The directory or URL of its embedder, if that is elsewhere by now.")
    ] = "",
    embedder_key_file: Annotated[str, typer.Option(help="Of a server: a file with its key.")] = "",
    threads: Annotated[int, typer.Option(help="Cores to use, up to 1024; 0: all that this process may use.")] = 0,
) -> None:
    """Bring a collection up to date with files: only what is new or changed is read and embedded, what is gone goes."""
    begin = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what is half built is removed
    with BuildProgress(sys.stderr) as progress:
        location = EmbedderLocation(embedder_at, embedder_key_file)
        threads = threads or len(os.sched_getaffinity(0))
        ingested = update(sources, out, location=location, threads=threads, progress=progress)
    print(
        f"{ingested.read:,} files new or changed, {ingested.gone:,} gone, {ingested.unchanged:,} unchanged; "
        f"{ingested.embedded:,} passages embedded"
    )
    if ingested.changed:
        _tell(out, ingested, begin)
    else:
        _tell_skipped(ingested)
        print(f"{out}: nothing changed")


def _tell(out: Path, ingested: IngestReport, begin: float) -> None:
    _tell_skipped(ingested)
    built = Collection.info(out)
    print(f"{out}: {built.size:,} vectors of {built.dim} dimensions, built in {time.monotonic() - begin:.1f} s")
    for line in _served(out):
        print(line)


def _tell_skipped(ingested: IngestReport) -> None:
    """Name every file that could not be read, and how many these are."""
    for path, reason in ingested.skipped.items():
        shown = path if path.isprintable() else ascii(path)  # a name may hold line feeds and a terminal's commands
        print(f"skipped {shown}: {reason}", file=sys.stderr)
    if ingested.skipped:
        print(f"{len(ingested.skipped):,} files could not be read, and were skipped", file=sys.stderr)


def _told(embedder: EmbedderSpec | None) -> str:
    """What an embedder is, and where it was when the collection was built."""
    if embedder is None or isinstance(embedder, str):
        return embedder or "none: queries come as vectors"
    place = embedder.directory if isinstance(embedder, DirectorySpec) else embedder.url
    prefixes = f"prefixes {embedder.query_prefix!r} of queries, {embedder.passage_prefix!r} of passages"
    return f"{embedder_name(embedder)}, of {place}; {prefixes}"


def _served(out: Path) -> list[str]:
    """A line for every running node that serves what was at `out` before."""
    lines = []
    for directory, node in running_nodes().items():
        name = node.name if directory.parent == nodes_dir() else str(directory)
        for collection, path in collection_paths(node).items():
            if Path(path).resolve() == out.resolve():
                lines.append(
                    f"node {node.name!r} goes on serving what was there before as {collection!r}, until "
                    f"`trinity index reload {name} {collection}`"
                )
    return lines


@index_app.command()
def reload(
    node: Annotated[str, typer.Argument(help="The node's name, or its run directory.")],
    collection: Annotated[str, typer.Argument(help="The collection's name in the node; without, all of them.")] = "",
    timeout: Annotated[float, typer.Option(help="Seconds to wait for all pool workers to serve it.")] = 1800.0,
) -> None:
    """Have a running node serve a collection that was rebuilt, without a pause; what is damaged is not taken."""
    done = reload_collections(find_node(node), collection, timeout)
    print(f"{collection or 'every collection'} reloaded by {', '.join(done) or 'no worker: none runs'}")


@index_app.command()
def info(directory: Directory) -> None:
    """Show what a collection is."""
    if is_live(directory):
        show_info(directory)
        return
    found = Collection.info(directory)
    sizes = {name: f"yes, {size / 1e6:,.1f} MB" if size else "no" for name, size in (
        ("documents", found.document_bytes), ("words", found.word_bytes),
    )}  # fmt: skip
    for name, value in {
        "vectors": f"{found.size:,}",
        "dimensions": found.dim,
        "metric": found.metric,
        "dtype": found.dtype,
        "degree": found.degree,
        "shards": found.shards,
        "index": f"{found.index_bytes / 1e6:,.1f} MB, {found.code_bytes / 1e6:,.1f} MB of it codes of neighbours",
        **sizes,
        "embedder": _told(found.embedder),
    }.items():
        print(f"{name:11} {value}")


@index_app.command()
def verify(directory: Directory) -> None:
    """Compare every file of a collection with its checksum."""
    if is_live(directory):
        show_verified(directory)
        return
    Collection.verify(directory)
    print(f"{directory}: every file is as it was built")


def search(
    directory: Directory,
    queries: Annotated[Path, typer.Option(help="Query vectors: .npy, a row a query.")],
    k: Annotated[int, typer.Option(help="Nearest vectors to find.")] = 10,
    out: Annotated[Path | None, typer.Option(help="Where to write the ids: .npy of int64, k for each query.")] = None,
    truth: Annotated[
        Path | None, typer.Option(help="The true ids: .npy, k or more for each query, nearest first.")
    ] = None,
    top_m: Annotated[
        int | None, typer.Option(help="Candidates kept; more finds more and takes longer. Without it 64, or k.")
    ] = None,
    search_width: Annotated[int, typer.Option(help="Parents expanded in each extend.")] = 1,
    patience: Annotated[int | None, typer.Option(help="Stop after so many extends without a change.")] = None,
    threads: Annotated[int, typer.Option(help="Cores to use.", min=1)] = 1,
) -> None:
    """Search a collection for many vectors at once; print queries per second, and recall if the truth is known."""
    kept = max(64, k) if top_m is None else top_m
    _check("--k" if top_m is None else "--top-m", kept, MAX_TOP_M)
    _check("--k", k, kept)
    _check("--search-width", search_width, MAX_SEARCH_WIDTH)
    wanted = read_vectors(queries)
    known = None if truth is None else read_truth(truth, len(wanted), k)
    with Collection.open(directory) as collection:
        # The first search compiles, or loads, the machine code: that is no part of the speed.
        collection.search(wanted[:1], k, kept, search_width, patience, threads)
        begin = time.perf_counter()
        ids, _ = collection.search(wanted, k, kept, search_width, patience, threads)
        seconds = time.perf_counter() - begin
    if out is not None:
        _write(out, ids)
    found = "" if known is None else f", recall@{k} {recall(ids, known):.4f}"
    print(f"{len(wanted):,} queries in {seconds:.3f} s: {len(wanted) / seconds:,.0f} queries/s{found}")


def _check(option: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise UsageError(f"{option} is {value}, outside 1..{most}")


def _write(out: Path, ids: np.ndarray) -> None:
    """The whole file or none of it."""
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
