"""Federated algorithms, one file each."""

from __future__ import annotations

from dpkernels.federated.algorithms.centred import Centred
from dpkernels.federated.algorithms.fedfc import FedFC
from dpkernels.federated.algorithms.fedgd import FedGD
from dpkernels.federated.algorithms.fednew import FedNew
from dpkernels.federated.algorithms.fedsofim import FedSOFIM
from dpkernels.federated.algorithms.scaffold import Scaffold

__all__ = ["Centred", "FedFC", "FedGD", "FedNew", "FedSOFIM", "Scaffold"]
