"""Arrival times and lengths of requests: from a real trace, scaled, or from a seeded Poisson process."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np

from runtime.simulator.traces import Arrival, at_rate, load_trace


@dataclass(frozen=True)
class Shape:
    """Mean and maximum lengths that this machine's model can serve; those of a trace are scaled to these means."""

    prompt_tokens: int = 160
    output_tokens: int = 24
    most_prompt_tokens: int = 1024
    most_output_tokens: int = 64


def arrivals(data: Path | None, rate: float, seconds: float, seed: int, shape: Shape) -> list[Arrival]:
    """Return arrivals for `seconds` at `rate` per second, Poisson without a trace.

    A trace (a file, or azure-2023-conv.csv in a directory) determines the order, the bursts and the ratios of lengths;
    rate and mean lengths are scaled.
    """
    if data is None:
        return list(_drawn(rate, seconds, np.random.default_rng(seed), shape))
    path = data / "azure-2023-conv.csv" if data.is_dir() else data
    count = max(1, round(rate * seconds))
    trace = load_trace(path, limit=count * 50)
    begin = seed * count % max(1, len(trace) - count)
    window = trace[begin : begin + count]
    window = [replace(arrival, at_s=arrival.at_s - window[0].at_s) for arrival in window]
    prompt = shape.prompt_tokens / fmean(arrival.prompt_tokens for arrival in window)
    output = shape.output_tokens / fmean(arrival.output_tokens for arrival in window)
    return [_bounded(a.at_s, a.prompt_tokens * prompt, a.output_tokens * output, shape) for a in at_rate(window, rate)]


def _drawn(rate: float, seconds: float, random: np.random.Generator, shape: Shape) -> Iterator[Arrival]:
    at_s = 0.0
    while True:
        at_s += random.exponential(1 / rate)
        if at_s > seconds:
            return
        prompt, output = random.lognormal(-0.32, 0.8, 2)  # mean 1: many short ones, a few long ones
        yield _bounded(at_s, shape.prompt_tokens * prompt, shape.output_tokens * output, shape)


def _bounded(at_s: float, prompt: float, output: float, shape: Shape) -> Arrival:
    return Arrival(
        at_s,
        min(shape.most_prompt_tokens, max(8, round(prompt))),
        min(shape.most_output_tokens, max(2, round(output))),
    )
