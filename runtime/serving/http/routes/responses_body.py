"""The body of a request for a response: input, tools, and what is refused by name."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field

from runtime.serving.http.api_types import MAX_TOKENS, Prioritized, ProbeOptions, filter_at
from runtime.serving.http.parsing import field_error, json_name, parse_fields, validate, without_null
from runtime.serving.http.routes.store_objects import Metadata
from runtime.serving.http.routes.vector_stores import RankingOptions

_TEXTS = ("input_text", "output_text", "text")
MAX_INPUT_FILES = 16  # each is read anew
RESULTS = "file_search_call.results"
_FIRST_RESULTS = "output[*].file_search_call.search_results"  # its first name, which OpenAI's cookbook still has


class InputFile(NamedTuple):
    """A file of the node's clients, whose text is a part of the message."""

    id: str


class InputMessage(NamedTuple):
    """A message of the input."""

    role: str
    parts: Sequence[str | InputFile]


def _validate_part(part: object) -> str | InputFile:
    kind = part.get("type") if isinstance(part, dict) else json_name(part)
    if isinstance(part, dict) and kind in _TEXTS and isinstance(part.get("text"), str):
        return str(part["text"])
    if not isinstance(part, dict) or kind != "input_file":
        raise field_error(f"content of type {str(kind)[:64]!r} is not supported, only text and input_file")
    for name in without_null(part):
        if name not in ("type", "file_id", "filename", "detail"):
            raise field_error(f"{name[:64]!r} of an input_file is not supported, only file_id: upload the file")
    if not isinstance(part.get("file_id"), str):
        raise field_error("an input_file needs the file_id of an uploaded file")
    return InputFile(part["file_id"])


def _validate_item(value: object) -> InputMessage | None:
    """Validate an item of the input: a message. A file search call of an earlier response is None."""
    if not isinstance(value, dict):
        raise field_error(f"an item of input must be an object, not {json_name(value)}")
    if (kind := value.get("type", "message")) == "file_search_call":
        return None
    if kind != "message":
        raise field_error(f"input of type {str(kind)[:64]!r} is not supported, only messages with text")
    content = value.get("content")
    if not isinstance(content, str | list):
        raise field_error(f"content must be a string or an array of parts, not {json_name(content)}")
    parts = [content] if isinstance(content, str) else [_validate_part(part) for part in content]
    role = "system" if value.get("role") == "developer" else value.get("role")
    if role not in ("system", "user", "assistant"):
        raise field_error(f"role is {str(role)[:64]!r}, it must be system, developer, user or assistant")
    return InputMessage(role, parts)


def _validate_input(value: object) -> object:
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise field_error(f"input must be a string or an array, not {json_name(value)}")
    messages = [item for item in map(_validate_item, value) if item is not None]
    if not messages:
        raise field_error("input has no message")
    files = sum(isinstance(part, InputFile) for message in messages for part in message.parts)
    if files > MAX_INPUT_FILES:
        raise field_error(f"input has {files} files, the limit is {MAX_INPUT_FILES}")
    return messages


def _validate_tools(value: object) -> object:
    if not isinstance(value, list):
        raise field_error(f"tools must be an array, not {json_name(value)}")
    for tool in value:
        kind = tool.get("type") if isinstance(tool, dict) else json_name(tool)
        if kind != "file_search":
            raise field_error(f"the tool {str(kind)[:64]!r} is not supported, only file_search")
    if len(value) > 1:
        raise field_error(f"tools has {len(value)} file_search tools, the limit is 1, with several vector stores")
    return value


def _validate_choice(value: object) -> object:
    kind = value.get("type") if isinstance(value, dict) else value
    if kind not in ("auto", "required", "none", "file_search"):
        raise field_error("tool_choice must be auto, required, none or file_search")
    return kind


def _validate_include(value: object) -> object:
    unknown = [one for one in value if one not in (RESULTS, _FIRST_RESULTS)] if isinstance(value, list) else [value]
    if unknown:
        raise field_error(f"include: {str(unknown[0])[:64]!r} is not supported, only {RESULTS}")
    return [RESULTS] if value else []


class FileSearchTool(ProbeOptions, extra="forbid"):
    """OpenAI's tool, with the probes of `retrieval`."""

    type: Literal["file_search"]
    vector_store_ids: list[str] = Field(min_length=1)
    max_num_results: int = Field(4, ge=1, le=MAX_TOKENS)
    filters: Annotated[Any, BeforeValidator(filter_at("tools[0].filters"))] = None
    ranking_options: RankingOptions | None = None
    probe_tokens: int = Field(0, ge=0, le=MAX_TOKENS)


class ResponsesBody(Prioritized):
    """POST /v1/responses."""

    model: str
    input: Annotated[list[Any], BeforeValidator(_validate_input)]
    """`InputMessage`s."""
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[list[FileSearchTool], BeforeValidator(_validate_tools)] = Field([])
    tool_choice: Annotated[str, BeforeValidator(_validate_choice)] = "auto"
    include: Annotated[list[str], BeforeValidator(_validate_include)] = Field([])
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    metadata: Metadata = Field({})
    store: bool = True
    parallel_tool_calls: bool = True  # one tool, one call
    stream: bool = False

    @property
    def tool(self) -> FileSearchTool | None:
        """The file search, unless it is not to be used."""
        return self.tools[0] if self.tools and self.tool_choice != "none" else None


def parse_responses(content: bytes) -> tuple[ResponsesBody, dict[str, Any]]:
    """Parse a body; return also its fields that another engine gets as they are. Raises InvalidRequest that names the
    parameter."""
    sent = parse_fields(ResponsesBody, content)
    return validate(ResponsesBody, sent), {name: sent[name] for name in Prioritized.model_fields if name in sent}
