"""HAProxy's configuration, for its version 2.6 and later."""

import shlex
from collections.abc import Sequence
from typing import Literal

from launchers.fleet.nodes import CONVERSATION, Address, error_text

Sticky = Literal["none", "conversation", "prefix"]

_TEMPLATE = """\
# Trinity nodes behind HAProxy, made by `trinity fleet haproxy`. Check it with: haproxy -c -f FILE
global
    log stdout format raw daemon notice
    maxconn 4096
    tune.bufsize 131072                          # a request is repeated only if it fits: prompts up to about 128 KiB

defaults
    mode http
    log global
    option httplog                               # of what failed, alone: why, and where
    option dontlog-normal
    option log-separate-errors
    timeout connect 2s
    timeout client 1h                            # between two bytes: a stream may think for long
    timeout server 1h
    timeout http-request 10s
    timeout http-keep-alive 60s                  # below the nodes' idle_timeout_s
    timeout queue 30s
    timeout check 2s                             # of /health, as with the other balancers
    option srvtcpka                              # a machine that has gone without a word, streams or not
    srvtcpka-idle 30s
    srvtcpka-intvl 5s
    srvtcpka-cnt 6
    option http-buffer-request                   # what was sent on before it was whole is not repeated
    option redispatch 1                          # a repeated request goes to another node
    retries 3
    retry-on conn-failure empty-response 503     # all of it before the first byte of an answer

    # What HAProxy says itself is written like a node's own errors.
    http-error status 502 content-type application/json string {lost} hdr Retry-After 1
    http-error status 503 content-type application/json string {none} hdr Retry-After 1

# Refused here: what concerns one node alone is asked of that node.
frontend trinity
    bind {listen}
    http-request set-header x-request-id %[uuid()] unless {{ req.hdr(x-request-id) -m found }}
    http-request deny deny_status 404 if {{ path /drain /metrics }}
    option forwardfor
    default_backend nodes

backend nodes
{balance}
    option httpchk
    http-check send meth GET uri /health hdr Host localhost
    http-check expect status 200
    default-server check inter 1s fastinter 200ms fall 2 rise 2 maxconn 480
    default-server observe layer4 error-limit 3 on-error mark-down    # between two looks at its health
{servers}
"""

_BALANCE = {
    "none": ["balance leastconn"],
    # A conversation's turns find their prefix in the node's KV. A node with half as much again as the mean passes the
    # next one on; without the header the nodes take turns.
    "conversation": [f"balance hdr({CONVERSATION})", "hash-type consistent", "hash-balance-factor 150"],
    # The same by how a prompt begins: the first message, or the prompt itself.
    "prefix": [
        "option http-buffer-request",
        "http-request set-var(txn.prefix) req.body,json_query('$.messages[0].content')",
        "http-request set-var(txn.prefix) req.body,json_query('$.prompt') unless { var(txn.prefix) -m found }",
        "http-request set-header x-prefix-hash %[var(txn.prefix),bytes(0,1024),xxh64,hex]",
        "balance hdr(x-prefix-hash)",
        "hash-type consistent",
        "hash-balance-factor 150",
    ],
}


def haproxy(nodes: Sequence[Address], listen: Address, sticky: Sticky) -> str:
    """The file's text."""
    return _TEMPLATE.format(
        listen=listen,
        lost=_quoted("the node broke off before it answered"),
        none=_quoted("no node takes requests"),
        balance="\n".join(f"    {line}" for line in _BALANCE[sticky]),
        servers="\n".join(f"    server node-{number} {address}" for number, address in enumerate(nodes, 1)),
    )


def _quoted(message: str) -> str:
    return shlex.quote(error_text(message))
