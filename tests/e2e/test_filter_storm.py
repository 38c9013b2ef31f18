"""A storm of the worst filters against a node: others are served, nothing restarts, every request ends."""

from pathlib import Path

from benchmarks.collections.storm import KINDS, filter_storm, report_storm


def test_others_are_served_during_storms_of_the_worst_filters_and_nothing_restarts(tmp_path: Path) -> None:
    found = filter_storm(tmp_path, rows=3000, seconds=1.0, clients=[24])  # raises if another user's request fails
    assert [(one["kind"], one["clients"]) for one in found["storms"]] == [(kind, 24) for kind in KINDS]
    for one in found["storms"]:
        assert one["restarts"] == []
        assert set(one["statuses"]) <= {200, 503}, one
        assert one["statuses"][200] > 0
        assert all(took["n"] > 0 for took in one["others"].values())
    assert "24 × deletes" in report_storm(found)
