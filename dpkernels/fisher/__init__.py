"""Fisher information of trained models: diagonal or Kronecker-factored, no label needed.

How sharply a model's own predictions depend on each parameter. It merges models that were trained
apart (FedFisher), prunes, quantises, or weighs a penalty against forgetting:

    import torch
    from dpkernels.fisher import fisher_information

    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    x = torch.randn(1000, 8)
    fisher = fisher_information(model, x.split(256))
    print(fisher.records, fisher.layers["0"].a.shape, fisher.layers["0"].g.shape)
    change = {name: 0.01 * torch.randn_like(p) for name, p in model.named_parameters()}
    print("KL of the changed model, nearly:", fisher.quadratic(change) / 2)
    diagonal = fisher_information(model, x.split(256), kind="diagonal", expectation="exact")
    print(diagonal.layers["0.weight"].values.shape, dict(diagonal.without))
"""

from dpkernels.fisher.estimate import fisher_information
from dpkernels.fisher.information import Diagonal, Fisher, Kronecker

__all__ = ["Diagonal", "Fisher", "Kronecker", "fisher_information"]
