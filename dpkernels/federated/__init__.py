"""Federated learning with differential privacy: clients, rounds, and what the server sees.

``contract`` says what an algorithm is, ``loop.Federation`` runs one, ``algorithms`` has them.
"""

from dpkernels.federated.algorithms import (
    PPSGD,
    Centaur,
    Centred,
    FedCEO,
    FedFC,
    FedGD,
    FedNew,
    FedSOFIM,
    LocalDPSGD,
    Scaffold,
    UDPFedAvg,
)
from dpkernels.federated.contract import Algorithm, Query, Seen, Stage, Terms, Visit
from dpkernels.federated.loop import Federation, Round
from dpkernels.federated.model import ModelProblem
from dpkernels.federated.problem import Cohort, Layer, LocalSGD, Problem
from dpkernels.federated.received import Message
from dpkernels.federated.softmax import SoftmaxProblem

__all__ = [
    "PPSGD",
    "Algorithm",
    "Centaur",
    "Centred",
    "Cohort",
    "FedCEO",
    "FedFC",
    "FedGD",
    "FedNew",
    "FedSOFIM",
    "Federation",
    "Layer",
    "LocalDPSGD",
    "LocalSGD",
    "Message",
    "ModelProblem",
    "Problem",
    "Query",
    "Round",
    "Scaffold",
    "Seen",
    "SoftmaxProblem",
    "Stage",
    "Terms",
    "UDPFedAvg",
    "Visit",
]
