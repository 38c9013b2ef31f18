"""Parameters of a simulator run."""

import msgspec

from runtime.node.config import NodeConfig
from runtime.simulator.policies import PolicyChoice
from runtime.simulator.times.service import ServiceTimes
from runtime.simulator.workload import Slos, Workload


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """All parameters of a run except its arrivals."""

    config: NodeConfig
    times: ServiceTimes = ServiceTimes()
    workload: Workload = Workload()
    slos: Slos = Slos()
    policy: PolicyChoice = PolicyChoice("configured")
    seed: int = 0
    sample_s: float = 1.0
