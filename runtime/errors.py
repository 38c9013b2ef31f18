"""The errors of `runtime`: one family, each with the code that crosses processes and the HTTP status it becomes."""

EXIT_FAILED = 1
EXIT_USAGE = 2  # as typer's own for an option that is wrong
EXIT_BUSY = 75  # sysexits.h EX_TEMPFAIL: trying again later may help
EXIT_CONFIG = 78  # sysexits.h EX_CONFIG: trying again would not help


class TrinityError(Exception):
    """Base of all errors a user of the runtime can meet. `code` is stable; the message gives value and limit.

    `exit_code`: of the `trinity` command, or of a worker, that ends with it (docs/operate.md, "Exit codes").
    """

    code = "internal_error"
    status = 500
    exit_code = EXIT_FAILED

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ConfigError(TrinityError):
    """The configuration cannot be run, or a file that a command was given. Raised before anything is started."""

    code = "config_error"
    exit_code = EXIT_CONFIG


class ResourceBusy(TrinityError):
    """What a node needs is in use, or there is too little of it just now: an address, a name, memory."""

    code = "resource_busy"
    status = 503
    exit_code = EXIT_BUSY


class InvalidRequest(TrinityError):
    """The request asks for something that cannot be: a wrong type, a value over its limit."""

    code = "invalid_request"
    status = 400


class UsageError(InvalidRequest):
    """The command line is wrong: what an option says, or what does not go together."""

    exit_code = EXIT_USAGE


class ContextLengthExceeded(InvalidRequest):
    """Prompt and answer together do not fit into the model's context."""

    code = "context_length_exceeded"


class UnknownCollection(InvalidRequest):
    """No collection of that name is loaded on this node."""

    code = "unknown_collection"
    status = 404


class InvalidFilter(InvalidRequest):
    """A filter is none, is over its limits, or compares what the collection does not have."""

    code = "invalid_filter"


class InvalidDocument(InvalidRequest):
    """A document to be stored is over a limit, or does not fit to those that the collection has."""

    code = "invalid_document"


class UnknownModel(InvalidRequest):
    """No model of that name is served by this node."""

    code = "model_not_found"
    status = 404


class UnknownRequest(InvalidRequest):
    """Nothing is known of a request with that id."""

    code = "request_not_found"
    status = 404


class Unauthorized(TrinityError):
    """The API key is missing or wrong."""

    code = "invalid_api_key"
    status = 401


class Forbidden(TrinityError):
    """The API key may not reach what is asked for."""

    code = "forbidden"
    status = 403


class Overloaded(TrinityError):
    """A queue is full. Nothing was accepted; try again later."""

    code = "overloaded"
    status = 503


class DeadlineExceeded(TrinityError):
    """The request's deadline passed before its result was there."""

    code = "deadline_exceeded"
    status = 504


class WorkerLost(TrinityError):
    """The process that held the request died, and the request with it."""

    code = "worker_lost"
    status = 503


class Unavailable(TrinityError):
    """No worker of the needed role is ready."""

    code = "unavailable"
    status = 503


class CollectionReplaced(Unavailable):
    """The build of a collection that was asked for is not served any more; another one is. Ask anew."""

    code = "collection_replaced"


class EngineUnreachable(Unavailable):
    """No server that runs the model answers."""

    code = "engine_unreachable"


class EngineFailed(TrinityError):
    """The server that runs the model answered with what it should not: an error of its own, or no answer at all."""

    code = "engine_failed"
    status = 502


class EngineRefusedKey(EngineFailed):
    """The server that runs the model does not take our key, or wants one."""

    code = "engine_refused_key"


class EmbedderUnreachable(Unavailable):
    """The server that turns texts into vectors does not answer, or has too much to do."""

    code = "embedder_unreachable"
    exit_code = EXIT_BUSY


class EmbedderFailed(TrinityError):
    """The server that turns texts into vectors answered with what it should not: an error, or no vectors."""

    code = "embedder_failed"
    status = 502


class CollectionError(TrinityError):
    """A collection's directory is missing, foreign or damaged."""

    code = "collection_error"
    exit_code = EXIT_CONFIG


class NoRoom(CollectionError):
    """A collection cannot be built or written to just now: the disk is full, or a quota, or memory is too little."""

    code = "no_room"
    status = 507
    exit_code = EXIT_BUSY


class CollectionBusy(CollectionError):
    """Another process writes to the collection, and only one may."""

    code = "collection_busy"
    status = 503
    exit_code = EXIT_BUSY


class BuildRefused(CollectionError):
    """An argument of a collection's build is outside its limits, or does not go with another."""

    exit_code = EXIT_USAGE


class OutputRefused(CollectionError):
    """What is where a collection is to be built is left as it is."""

    exit_code = EXIT_USAGE


class ModelError(TrinityError):
    """A model or embedder cannot be loaded: its package or files are missing."""

    code = "model_error"
    exit_code = EXIT_CONFIG


class InternalError(TrinityError):
    """A fault of Trinity's own."""


def _family(root: type[TrinityError]) -> list[type[TrinityError]]:
    return [root, *(kind for child in root.__subclasses__() for kind in _family(child))]


_BY_CODE = {kind.code: kind for kind in reversed(_family(TrinityError))}


def error_from_code(code: str, message: str, param: str | None = None) -> TrinityError:
    """The error that a worker reported, as an exception of its own class (an unknown code becomes `InternalError`)."""
    return _BY_CODE.get(code, InternalError)(message, param)
