"""Envoy's configuration, static, for its API v3."""

import json
from collections.abc import Sequence

from launchers.fleet.haproxy import Sticky
from launchers.fleet.nodes import CONVERSATION, Address, error_text
from runtime.errors import UsageError

_TEMPLATE = """\
# Trinity nodes behind Envoy, made by `trinity fleet envoy`. Check it with: envoy --mode validate -c FILE.yaml
static_resources:
  listeners:
  - name: trinity
    address: {{socket_address: {{address: "{listen.host}", port_value: {listen.port}}}}}
    per_connection_buffer_limit_bytes: 2097152   # a request is repeated only if it fits: bodies have 1 MiB at most
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: trinity
          server_header_transformation: PASS_THROUGH
          use_remote_address: true               # X-Forwarded-For
          preserve_external_request_id: true     # the client's x-request-id goes on; else Envoy makes one
          stream_idle_timeout: 3600s             # between two bytes: a stream may think for long
          request_timeout: 0s
          local_reply_config:                    # what Envoy says itself is written like a node's own errors
            mappers:
            - filter:
                status_code_filter: {{comparison: {{op: GE, value: {{default_value: 502, runtime_key: none}}}}}}
              headers_to_add: [{{header: {{key: retry-after, value: "1"}}}}]
              body_format_override:
                content_type: application/json
                text_format_source: {{inline_string: {error}}}
          route_config:
            virtual_hosts:
            - name: trinity
              domains: ["*"]
              routes:
              - {{match: {{path: /drain}}, direct_response: {{status: 404}}}}
              - {{match: {{path: /metrics}}, direct_response: {{status: 404}}}}
              - match: {{prefix: /}}
                route:
                  cluster: nodes
{hash_policy}                  timeout: 0s
                  retry_policy:                  # all of it before the first byte of an answer
                    retry_on: connect-failure,refused-stream,reset,retriable-status-codes
                    retriable_status_codes: [503]
                    num_retries: 3
                    retry_host_predicate:
                    - name: envoy.retry_host_predicates.previous_hosts
                      typed_config:
                        "@type": {previous_hosts}
                    host_selection_retry_max_attempts: 5
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {{"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}
  clusters:
  - name: nodes
    type: STRICT_DNS
    connect_timeout: 2s
    lb_policy: {policy}
    common_lb_config: {{{common}}}
    circuit_breakers:
      thresholds:
      - {{max_connections: 4096, max_pending_requests: 4096, max_requests: 4096, max_retries: 1024}}
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        common_http_protocol_options: {{idle_timeout: 60s}}     # below the nodes' idle_timeout_s
        explicit_http_config: {{http_protocol_options: {{}}}}
    upstream_connection_options:                 # a machine that has gone without a word, streams or not
      tcp_keepalive: {{keepalive_time: 30, keepalive_interval: 5, keepalive_probes: 6}}
    health_checks:
    - timeout: 2s
      interval: 1s
      no_traffic_interval: 1s
      unhealthy_interval: 1s
      unhealthy_threshold: 2
      healthy_threshold: 2
      http_health_check: {{path: /health, host: localhost}}
    outlier_detection:                           # between two looks at its health
      split_external_local_origin_errors: true
      consecutive_local_origin_failure: 3
      consecutive_gateway_failure: 20            # 502, 503, 504
      enforcing_consecutive_gateway_failure: 100
      enforcing_consecutive_5xx: 0
      enforcing_success_rate: 0
      enforcing_local_origin_success_rate: 0
      base_ejection_time: 5s
      max_ejection_percent: 50
    load_assignment:
      cluster_name: nodes
      endpoints:
      - lb_endpoints:
{endpoints}
"""

_PREVIOUS_HOSTS = "type.googleapis.com/envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
_COMMON = "healthy_panic_threshold: {value: 0}"  # one that drains is never asked, even if all but one do
_BOUND = "consistent_hashing_lb_config: {hash_balance_factor: 150}"


def envoy(nodes: Sequence[Address], listen: Address, sticky: Sticky) -> str:
    """The file's text. Raises UsageError for what Envoy cannot do by itself."""
    if sticky == "prefix":
        raise UsageError("Envoy routes by headers, not by what a body says: take --sticky conversation, or HAProxy")
    if listen.is_name:
        raise UsageError(f"--listen is {listen}: Envoy wants an address there, such as 127.0.0.1:{listen.port}")
    by_header = sticky == "conversation"
    hash_policy = f"                  hash_policy: [{{header: {{header_name: {CONVERSATION}}}}}]\n"
    return _TEMPLATE.format(
        listen=listen,
        error=json.dumps(error_text("no node takes requests")),
        previous_hosts=_PREVIOUS_HOSTS,
        hash_policy=hash_policy if by_header else "",
        policy="RING_HASH" if by_header else "LEAST_REQUEST",
        common=f"{_COMMON}, {_BOUND}" if by_header else _COMMON,
        endpoints="\n".join(map(_endpoint, nodes)),
    )


def _endpoint(node: Address) -> str:
    return f'        - endpoint: {{address: {{socket_address: {{address: "{node.host}", port_value: {node.port}}}}}}}'
