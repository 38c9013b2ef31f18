"""What a step costs: by bucket, by form of launch, beside a plain copy; and how much of it is the host's."""

from dataclasses import asdict
from typing import Any

import numpy as np

from benchmarks.gpu_check.drive import drive
from benchmarks.gpu_check.report import Outcome, micros
from benchmarks.gpu_check.setup import Setup
from gpu.backends import copy_bytes_s
from gpu.roofline import measure_extends, search_roofline

_LAUNCH = 16  # extends a launch, in the forms that do several


def check(setup: Setup) -> Outcome:
    """Extend times, the bandwidth that they use, the host's part, and launches of several extends."""
    copy = copy_bytes_s(setup.device)
    engine = setup.engine()
    times = measure_extends(engine, "docs", setup.index, setup.params)
    roofline = search_roofline(setup.device_name, copy, times)
    lines = [("copy, bytes read and written", f"{2 * copy / 1e9:,.0f} GB/s")]
    for one in times:
        used = one.nbytes / one.seconds / (2 * copy)
        what = f"{micros(one.seconds)}, {used:.1%} of the copy if every edge's vector is read"
        lines.append((f"extend of {one.active} slots", what))
    curve = roofline.saturation
    lines.append(("u(X) = min(u_max, (X/X_sat)^α)", f"{curve.u_max:.3f}, {curve.x_sat:.0f}, {curve.alpha:.2f}"))
    data: dict[str, Any] = {"roofline": asdict(roofline), "forms": {}}
    queries = np.tile(setup.data.queries, (2, 1))[: 40 if setup.small else 4 * setup.slots]
    shipped = drive(engine, queries, setup.params)
    engine.close()
    step_s, query_s = shipped.host_s / shipped.steps, shipped.host_s / shipped.finished
    host = ("host time a step, all slots in use", step_s), ("… a query", query_s)
    lines += [(what, micros(seconds) if setup.on_gpu else "skipped: no GPU") for what, seconds in host]
    data["forms"]["shipped"] = _form(shipped)
    for form, limit in (("plain", 1), ("loop", _LAUNCH), ("fused", _LAUNCH)):
        what = f"{limit} extends a launch, {form}"
        if not setup.on_gpu:
            lines.append((what, "skipped: no GPU"))
            continue
        tuned = setup.cuda_engine(extends_per_launch=limit, form=form)
        made, refused = sorted(set(tuned.forms.values())), tuned.refused
        found = drive(tuned, queries, setup.params)
        single = setup.cuda_engine(1, extends_per_launch=limit, form=form)
        alone = drive(single, queries[:50], setup.params)
        single.close()
        tuned.close()
        same = float(np.mean(found.ids == shipped.ids))
        what += "" if made == [form] else f" (the device gave {', '.join(made)}: {refused})"
        lines.append((what, f"{found.finished / found.seconds:,.0f} queries/s, {same:.1%} same ids as shipped"))
        lines.append((f"… one query at a time, {form}, p50", micros(alone.percentile(0.5))))
        data["forms"][form] = {**_form(found), "made": made, "alone_p50_s": alone.percentile(0.5), "same_ids": same}
    return Outcome(lines, data)


def _form(found: Any) -> dict[str, float]:
    return {
        "queries_per_s": found.finished / found.seconds,
        "steps": found.steps,
        "extends": found.extends,
        "host_s": found.host_s,
        "seconds": found.seconds,
    }
