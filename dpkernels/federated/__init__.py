"""Federated learning with differential privacy: clients, rounds, and what the server sees.

``contract`` says what an algorithm is, ``loop.Federation`` runs one, ``algorithms`` has them.
"""

from dpkernels.federated.algorithms import (
    PPSGD,
    Centaur,
    Centred,
    FedCEO,
    FedFC,
    FedFisher,
    FedGD,
    FedNew,
    FedSOFIM,
    LocalDPSGD,
    Scaffold,
    UDPFedAvg,
)
from dpkernels.federated.contract import Algorithm, Query, Seen, Stage, Terms, Visit
from dpkernels.federated.loop import Federation, Round
from dpkernels.federated.merging import (
    Adam,
    ConjugateGradients,
    GradientDescent,
    Merged,
    merge,
)
from dpkernels.federated.model import ModelProblem
from dpkernels.federated.problem import Cohort, Layer, LocalSGD, Problem
from dpkernels.federated.received import Message
from dpkernels.federated.softmax import SoftmaxProblem

__all__ = [
    "PPSGD",
    "Adam",
    "Algorithm",
    "Centaur",
    "Centred",
    "Cohort",
    "ConjugateGradients",
    "FedCEO",
    "FedFC",
    "FedFisher",
    "FedGD",
    "FedNew",
    "FedSOFIM",
    "Federation",
    "GradientDescent",
    "Layer",
    "LocalDPSGD",
    "LocalSGD",
    "Merged",
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
    "merge",
]
