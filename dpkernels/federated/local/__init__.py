"""Local training of all clients of a round at once: stacked, chained, mapped, or looped."""

from dpkernels.federated.local.chain import Chain, chain_of
from dpkernels.federated.local.chained import chained_updates
from dpkernels.federated.local.clipped import clipped_sums
from dpkernels.federated.local.engine_sums import EngineSums, private_copy
from dpkernels.federated.local.gram import Grams
from dpkernels.federated.local.network import network_of
from dpkernels.federated.local.plan import Plan, Way, plan_of
from dpkernels.federated.local.sgd import stacked_updates
from dpkernels.federated.local.vmapped import vmapped_updates

__all__ = [
    "Chain",
    "EngineSums",
    "Grams",
    "Plan",
    "Way",
    "chain_of",
    "chained_updates",
    "clipped_sums",
    "network_of",
    "plan_of",
    "private_copy",
    "stacked_updates",
    "vmapped_updates",
]
