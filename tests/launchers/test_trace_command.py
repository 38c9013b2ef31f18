"""`trinity trace` shows every stage of a request on a timeline, readable at 80 columns."""

import io

from rich.console import Console

from launchers.commands.trace import show
from runtime.serving.frontend.observability import ProbeTime, StageTime, Trace

STAGES = (
    StageTime("queue", 0.0, 0.001),
    StageTime("retrieval", 0.001, 0.25),
    StageTime("prefill", 0.25, 0.5),
    StageTime("decode", 0.5, 1.0),
)


def trace(**changes: object) -> Trace:
    fields = {
        "id": "chatcmpl-1-1", "state": "stop", "prefill_worker": "prefill-0", "decode_worker": "decode-1",
        "restarts": 0, "prompt_tokens": 120, "completion_tokens": 11, "elapsed_s": 1.0, "first_token_s": 0.5,
        "stages": STAGES, "probes": (),
    }  # fmt: skip
    return Trace(**fields | changes)  # type: ignore[arg-type]


def shown(found: Trace, width: int = 80) -> list[str]:
    out = io.StringIO()
    show(found, Console(file=out, width=width, color_system=None))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def line(lines: list[str], label: str) -> str:
    return next(line for line in lines if line.strip().startswith(label))


def test_each_stage_has_a_line_with_its_begin_its_length_and_its_share() -> None:
    lines = shown(trace())
    assert line(lines, "prefill ").split()[:4] == ["prefill", "250.0", "250.0", "25.0%"]
    assert line(lines, "decode").split()[:4] == ["decode", "500.0", "500.0", "50.0%"]
    assert "prefill-0 → decode-1, 120 tokens → 11" in lines
    assert "first token after 500.0 ms, 50.0 ms per later token" in lines


def test_no_line_is_wider_than_the_terminal() -> None:
    probes = tuple(ProbeTime(8 * n, 0.5 + n / 200, 0.502 + n / 200, 0.002, 1, "answered") for n in range(60))
    for text in shown(trace(probes=probes, probes_left_out=7, elapsed_s=123.456)):
        assert len(text) <= 80, text


def test_probes_have_one_line_each_and_a_total() -> None:
    probes = (
        ProbeTime(16, 0.6, 0.61, 0.01, 2, "answered"),
        ProbeTime(32, 0.7, 0.75, 0.001, 0, "late"),
    )
    lines = shown(trace(probes=probes))
    assert line(lines, "probe @32").split()[2:5] == ["700.0", "50.0", "5.0%"]
    assert "2 probes stalled the answer for 11.0 ms and added 2 new passages; 1 late" in lines
    assert "1 probe stalled the answer for 1.0 ms and added 1 new passage" in shown(
        trace(probes=(ProbeTime(16, 0.6, 0.61, 0.001, 1, "answered"),))
    )


def test_a_search_shows_its_stages_and_results() -> None:
    embed, retrieval = StageTime("embed", 0.0, 0.004), StageTime("retrieval", 0.004, 0.01)
    lines = shown(
        trace(id="ret-1-2", kind="search", state="found", passages=4, client_id="[b]mine", stages=(embed, retrieval),
              elapsed_s=0.01, first_token_s=None, prefill_worker="", decode_worker="", completion_tokens=0)
    )  # fmt: skip
    assert lines[:2] == ["ret-1-2 ([b]mine)  found after 10.0 ms", "search, 4 passages"]
    assert line(lines, "retrieval").split()[:4] == ["retrieval", "4.0", "6.0", "60.0%"]
    assert "→" not in "".join(lines)
