"""Number of examples of the fuzz tests: few by default, `--fuzz-examples N` for more."""

from hypothesis import HealthCheck, settings

USUAL = 30
examples = USUAL
"""Set by the option before the tests are imported."""


def fuzzed(share: float = 1.0) -> settings:
    """Return a property test's settings; by default it tries `share` of the usual number, for expensive examples.

    With `--fuzz-examples` every test tries all. An example's time is not limited, because other processes share the
    machine.
    """
    count = examples if examples > USUAL else max(1, int(share * examples))
    slow = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]
    return settings(max_examples=count, suppress_health_check=slow)
