"""`trinity workers`: options are validated before the node is contacted."""

import pytest
from typer.testing import CliRunner

from launchers.commands.workers import workers_app
from runtime.errors import UsageError


@pytest.mark.parametrize(
    ("words", "trouble"),
    [
        (["drain", "--gpu", "decode"], "--gpu 'decode' is not a GPU"),
        (["drain", "--gpu", "decode-1"], "--gpu 'decode-1' is not a GPU"),
        (["add", "--gpu", "3"], "--gpu '3' is not a GPU"),
        (["drain", "decode", "--name", "prefill-0"], "--name 'prefill-0' is not a decode worker"),
        (["flip", "prefill", "--name", "decode-0"], "--name 'decode-0' is not a prefill worker"),
        (["drain", "decode", "--gpu", "cuda:3"], "give either a role"),
        (["drain"], "give either a role"),
    ],
)
def test_contradictory_options_are_refused_before_a_node_is_contacted(words: list[str], trouble: str) -> None:
    refused = CliRunner().invoke(workers_app, words).exception
    assert isinstance(refused, UsageError)
    assert trouble in refused.message


def test_a_gpu_and_a_role_are_sent_to_the_node() -> None:
    for words in (["drain", "--gpu", "GPU-1"], ["drain", "decode", "--name", "decode-1"], ["flip", "decode"]):
        refused = CliRunner().invoke(workers_app, [*words, "--node", "there-is-none"]).exception
        assert "no node runs in" in str(refused)
