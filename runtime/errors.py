"""Exceptions of `runtime`: one hierarchy; each class has the code sent between processes and its HTTP status."""

import json

EXIT_FAILED = 1
EXIT_USAGE = 2  # typer's code for an invalid option
EXIT_BUSY = 75  # sysexits.h EX_TEMPFAIL: a retry may succeed
EXIT_CONFIG = 78  # sysexits.h EX_CONFIG: a retry fails again


class TrinityError(Exception):
    """Base of all errors that users of the runtime can encounter. `code` is stable; the message contains value and
    limit.

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
    """The configuration, or a file given to a command, cannot be used. Raised before anything is started."""

    code = "config_error"
    exit_code = EXIT_CONFIG


class ResourceBusy(TrinityError):
    """A resource that a node needs is in use or scarce at the moment: an address, a name, memory."""

    code = "resource_busy"
    status = 503
    exit_code = EXIT_BUSY


class InvalidRequest(TrinityError):
    """The request is invalid: a wrong type, a value over its limit."""

    code = "invalid_request"
    status = 400


class UsageError(InvalidRequest):
    """The command line is invalid: the value of an option, or a combination of options."""

    exit_code = EXIT_USAGE


class ContextLengthExceeded(InvalidRequest):
    """Prompt and answer together exceed the model's context."""

    code = "context_length_exceeded"


class ResponseTooLarge(InvalidRequest):
    """The response would be larger than its limit."""

    code = "response_too_large"


class UnknownCollection(InvalidRequest):
    """This node serves no collection of that name."""

    code = "unknown_collection"
    status = 404


class InvalidFilter(InvalidRequest):
    """A filter is malformed, exceeds its limits, or uses attributes that the collection does not have."""

    code = "invalid_filter"


class InvalidDocument(InvalidRequest):
    """A document to be stored exceeds a limit, or does not match the collection's schema."""

    code = "invalid_document"


class UnknownModel(InvalidRequest):
    """This node serves no model of that name."""

    code = "model_not_found"
    status = 404


class UnknownRequest(InvalidRequest):
    """There is no request with that id."""

    code = "request_not_found"
    status = 404


class Unauthorized(TrinityError):
    """The API key is missing or wrong."""

    code = "invalid_api_key"
    status = 401


class Forbidden(TrinityError):
    """The API key does not grant access to the requested resource."""

    code = "forbidden"
    status = 403


class Overloaded(TrinityError):
    """A queue is full. Nothing was accepted; retry later."""

    code = "overloaded"
    status = 503


class DeadlineExceeded(TrinityError):
    """The deadline passed before the result was available."""

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
    """The requested build of a collection has been replaced by another one. Retry."""

    code = "collection_replaced"


class EngineUnreachable(Unavailable):
    """No server that runs the model can be reached."""

    code = "engine_unreachable"


class EngineFailed(TrinityError):
    """The server that runs the model returned an error or an invalid response."""

    code = "engine_failed"
    status = 502


class EngineRefusedKey(EngineFailed):
    """The server that runs the model rejected the API key, or requires one."""

    code = "engine_refused_key"


class EmbedderUnreachable(Unavailable):
    """The embedding server cannot be reached or is overloaded."""

    code = "embedder_unreachable"
    exit_code = EXIT_BUSY


class EmbedderFailed(TrinityError):
    """The embedding server returned an error or an invalid response."""

    code = "embedder_failed"
    status = 502


class RerankerUnreachable(Unavailable):
    """The reranking server cannot be reached or is overloaded."""

    code = "reranker_unreachable"


class RerankerFailed(TrinityError):
    """The reranker failed, or its server returned an error or an invalid response."""

    code = "reranker_failed"
    status = 502


class CollectionError(TrinityError):
    """A collection's directory is missing, damaged, or not a collection."""

    code = "collection_error"
    exit_code = EXIT_CONFIG


class NoRoom(CollectionError):
    """A collection cannot be built or written to: disk, quota or memory are exhausted."""

    code = "no_room"
    status = 507
    exit_code = EXIT_BUSY


class CollectionBusy(CollectionError):
    """Another process is writing to the collection; only one writer is allowed."""

    code = "collection_busy"
    status = 503
    exit_code = EXIT_BUSY


class BuildRefused(CollectionError):
    """An argument of a collection's build is out of range, or conflicts with another one."""

    exit_code = EXIT_USAGE


class OutputRefused(CollectionError):
    """The output path of a build exists and is not overwritten."""

    exit_code = EXIT_USAGE


class ModelError(TrinityError):
    """A model or embedder cannot be loaded: its package or files are missing."""

    code = "model_error"
    exit_code = EXIT_CONFIG


class DeviceFailed(TrinityError):
    """A GPU reported an error after which its process cannot use it any more: the process ends, and is restarted."""

    code = "device_failed"
    status = 503


class InternalError(TrinityError):
    """An internal error of Trinity."""


def _hierarchy(root: type[TrinityError]) -> list[type[TrinityError]]:
    return [root, *(error for child in root.__subclasses__() for error in _hierarchy(child))]


_BY_CODE = {found.code: found for found in reversed(_hierarchy(TrinityError))}


def error_from_code(code: str, message: str, param: str | None = None) -> TrinityError:
    """Return the error that a worker reported as an exception of its own class; an unknown code becomes
    `InternalError`."""
    return _BY_CODE.get(code, InternalError)(message, param)


def error_from_response(status: int, body: bytes | str) -> TrinityError:
    """Return the error that a node answered with over HTTP, `Unavailable` if the body has none."""
    try:
        error = json.loads(body)["error"]
        return error_from_code(str(error["code"]), str(error["message"]), error.get("param"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return Unavailable(f"unexpected status {status} from the node: {body[:200]!r}")
