"""Federated algorithms, one file each."""

from __future__ import annotations

from dpkernels.federated.algorithms.centaur import Centaur
from dpkernels.federated.algorithms.centred import Centred
from dpkernels.federated.algorithms.fedceo import FedCEO
from dpkernels.federated.algorithms.fedfc import FedFC
from dpkernels.federated.algorithms.fedfisher import FedFisher
from dpkernels.federated.algorithms.fedgd import FedGD
from dpkernels.federated.algorithms.fednew import FedNew
from dpkernels.federated.algorithms.fedsofim import FedSOFIM
from dpkernels.federated.algorithms.local_dpsgd import LocalDPSGD
from dpkernels.federated.algorithms.ppsgd import PPSGD
from dpkernels.federated.algorithms.scaffold import Scaffold
from dpkernels.federated.algorithms.udp_fedavg import UDPFedAvg

__all__ = [
    "PPSGD",
    "Centaur",
    "Centred",
    "FedCEO",
    "FedFC",
    "FedFisher",
    "FedGD",
    "FedNew",
    "FedSOFIM",
    "LocalDPSGD",
    "Scaffold",
    "UDPFedAvg",
]
