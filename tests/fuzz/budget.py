"""How many examples the tests of this folder try: few in the usual run, `--fuzz-examples N` for more."""

from hypothesis import HealthCheck, settings

USUAL = 100
examples = USUAL
"""Set by the option before the tests are imported."""


def fuzzed(share: float = 1.0) -> settings:
    """A property test's settings; in the usual run it tries `share` of the usual number, where an example costs more.

    The long form tries all of them everywhere. There is no limit on an example's time: other processes share the
    machine.
    """
    count = examples if examples > USUAL else max(1, int(share * examples))
    slow = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]
    return settings(max_examples=count, suppress_health_check=slow)
