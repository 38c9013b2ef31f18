"""Parameters of a simulator run."""

import msgspec

from runtime.node.config import NodeConfig
from runtime.simulator.policies import PolicyChoice
from runtime.simulator.times.collectives import Collectives
from runtime.simulator.times.service import ServiceTimes
from runtime.simulator.workload import Slos, Workload


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """All parameters of a run except its arrivals."""

    config: NodeConfig
    times: ServiceTimes = ServiceTimes()
    collectives: Collectives = Collectives()
    workload: Workload = Workload()
    slos: Slos = Slos()
    policy: PolicyChoice = PolicyChoice("configured")
    seed: int = 0
    sample_s: float = 1.0

    def with_collectives(self, gpus: int) -> "Setup":
        """Return the setup of a node of `gpus` GPUs with the times of its `collectives`, which are then applied."""
        independent = self.config.pool.workers if "own" in self.config.pool.placement else 0
        times = self.collectives.applied(self.times, independent, gpus)
        return msgspec.structs.replace(self, times=times, collectives=Collectives())
