"""How the KV of a prompt gets from a prefill server to a decode server, by engine: the fields of both requests."""

import random
from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit

from runtime.engines.event_endpoints import EventEndpoints
from runtime.engines.openai.server import Server
from runtime.node.engine_config import OpenAiSection

Json = dict[str, Any]

_ROOMS = 1 << 62  # SGLang's rooms are 63-bit; those of `n` choices are consecutive
_NO_TRANSFER_HOST = "2.2.2.2"  # SGLang's own warm-up requests, which have no partner, name this host


# Removed from vLLM's prefill request: fields that conflict with one token, or only add cost there.
_DECODE_ONLY = ("stream_options", "min_tokens", "max_completion_tokens", "return_token_ids")
_PREFILL_PARAMS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class Transfer(Protocol):
    """Metadata of an engine's KV transfers."""

    paired: bool
    """Whether both servers get the request at the same time, and neither can answer without the other."""

    def prefill_body(self, server: Server, body: Json) -> Json:
        """Return the request of the prefill server, whose response is not streamed."""

    def decode_fields(self, prefill_body: Json, answer: Json) -> Json:
        """Return the fields to add to the decode server's request; `answer`: prefill's, empty if paired."""


class VllmTransfer:
    """vLLM's connectors, by the protocol of vLLM's own proxies.

    Prefill computes one token, which is discarded, with `do_remote_decode`; the `kv_transfer_params` of its response
    go to decode and locate the KV.
    """

    paired = False

    def prefill_body(self, server: Server, body: Json) -> Json:
        kept = {name: value for name, value in body.items() if name not in _DECODE_ONLY}
        return kept | {"stream": False, "max_tokens": 1, "kv_transfer_params": _PREFILL_PARAMS}

    def decode_fields(self, prefill_body: Json, answer: Json) -> Json:
        params = answer.get("kv_transfer_params")
        return {"kv_transfer_params": params} if isinstance(params, dict) and params else {}


class SglangTransfer:
    """SGLang's bootstrap, by the protocol of its own router.

    Both servers get the same request with the address of prefill's bootstrap server, where they find each other, and
    the room: a random number that identifies the request. `ports`: of the bootstrap servers, by the server's URL.
    """

    paired = True

    def __init__(self, ports: Mapping[str, int], source: random.Random | None = None) -> None:
        self._ports, self._source = ports, source or random.SystemRandom()

    def prefill_body(self, server: Server, body: Json) -> Json:
        host = urlsplit(server.url).hostname or ""
        fields = {
            "bootstrap_host": f"[{host}]" if ":" in host else host,
            "bootstrap_port": self._ports[server.url],
            "bootstrap_room": self._source.randrange(_ROOMS),
        }
        kept = {name: value for name, value in body.items() if name != "stream_options"}
        return kept | {"stream": False} | fields

    def decode_fields(self, prefill_body: Json, answer: Json) -> Json:
        return {name: value for name, value in prefill_body.items() if name.startswith("bootstrap_")}


def transfer_of(section: OpenAiSection) -> Transfer:
    """Return the transfer of the configured engine; vLLM's without separate servers, which then is not used."""
    prefill = section.prefill
    if prefill is None or prefill.transfer == "vllm":
        return VllmTransfer()
    return SglangTransfer(prefill.ports)


def servers_of(section: OpenAiSection, key: str) -> list[Server]:
    """Return the section's servers: those at `model.url`, then those of prefill."""
    servers = _servers(section, key)
    replays = section.kv_events_replay or ("",) * len(section.kv_events)
    for server, events, replay in zip(servers, section.kv_events, replays, strict=False):
        server.events = EventEndpoints(events, replay)
    return servers


def _servers(section: OpenAiSection, key: str) -> list[Server]:
    if section.prefill is None:
        return [Server(url, key) for url in section.urls]
    fields: Json = {}
    if section.prefill.transfer == "sglang":  # refuses requests without a room
        fields = {"bootstrap_host": _NO_TRANSFER_HOST, "bootstrap_room": 0}
    decode = [Server(url, key, stage="decode", unpaired_fields=fields) for url in section.urls]
    return decode + [Server(url, key, stage="prefill", unpaired_fields=fields) for url in section.prefill.urls]
