"""What the FedFisher paper prints, in percent (Tables 2, 4 and 5) and in seconds (Table 1).

FedAvg's cells of Table 2, and Figures 2 and 3, are not in our copy: there is nothing to compare
with.
"""

from __future__ import annotations

ALPHAS = (0.2, 0.1, 0.05)
FASHION, CIFAR = "fashion", "cifar10"

# Table 2, five clients: data set -> row -> accuracy at alpha .2 / .1 / .05.
TABLE_2: dict[str, dict[str, tuple[float, float, float]]] = {
    FASHION: {
        "OTFusion": (58.40, 43.77, 37.53),
        "PFNM": (63.50, 59.27, 45.69),
        "RegMean": (71.09, 56.98, 50.40),
        "DENSE": (72.69, 50.11, 46.62),
        "FisherMerge": (61.81, 54.71, 43.03),
        "FedFisher(Diag)": (65.44, 55.04, 45.92),
        "FedFisher(K-FAC)": (76.28, 68.36, 53.29),
    },
    CIFAR: {
        "OTFusion": (40.35, 40.45, 30.62),
        "PFNM": (45.75, 39.43, 30.58),
        "RegMean": (43.41, 36.65, 32.84),
        "DENSE": (44.79, 38.65, 32.65),
        "FisherMerge": (39.90, 36.53, 30.89),
        "FedFisher(Diag)": (44.04, 40.04, 31.08),
        "FedFisher(K-FAC)": (51.67, 47.01, 40.02),
    },
}

# Table 4, FedFisher(Diag) at alpha .1: data set -> accuracy by s_q (1: not compressed).
TABLE_4: dict[str, dict[int, float]] = {
    FASHION: {1: 54.64, 2: 56.56},
    CIFAR: {1: 39.68, 2: 39.44},
}

# Table 5, FedFisher(K-FAC) at alpha .1: data set -> accuracy by s_q (1: not compressed). s_v, the
# share of singular values that are dropped, follows from the byte budget: 3, 1.5 and 1 times for
# FashionMNIST, 4, 2 and 1.33 for CIFAR-10.
TABLE_5: dict[str, dict[int, float]] = {
    FASHION: {1: 68.47, 2: 65.87, 4: 68.96, 6: 63.90},
    CIFAR: {1: 49.13, 2: 45.29, 4: 47.60, 6: 43.53},
}

# Table 1: data set -> seconds of local training, with the K-FAC, with the diagonal.
TABLE_1: dict[str, tuple[float, float, float]] = {
    FASHION: (14.5, 16.0, 16.6),
    CIFAR: (20.9, 23.1, 23.7),
}
