"""Audits: lower bounds on epsilon, found by attacking the mechanism as it really runs.

An audit's bound above the epsilon that is claimed shows a bug, but for the audit's own chance of
error (1 - confidence). A bound below it shows nothing about data sets and attacks that were not
tried.

``distinguishing_audit`` runs a step thousands of times with and without one record: sharp, for a
step or a short training. ``one_run_audit`` needs one training with canaries in it: it sees mistakes
of the whole run (sampling, composition, no clipping), and only large ones.

To audit a step of ``make_private``, with a learning rate of 0 so that every trial is the same::

    training = dpkernels.make_private(model, torch.optim.SGD(model.parameters(), lr=0.0), ...)

    def release(present: bool) -> Tensor:
        inputs = torch.cat([others, record]) if present else others
        loss(model(inputs)).sum().backward()
        training.optimizer.step()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    result = distinguishing_audit(release, trials=4000, delta=1e-5, assumes="gaussian")
    assert not result.contradicts(claimed_epsilon)

The record should be the worst one: its gradient longer than the clipping norm, and the others ones
that it could change.
"""

from dpkernels.privacy.audit.distinguish import DistinguishingResult, distinguishing_audit
from dpkernels.privacy.audit.one_run import (
    OneRunResult,
    epsilon_lower_bound,
    loss_decrease,
    one_run_audit,
)
from dpkernels.privacy.audit.result import AuditResult

__all__ = [
    "AuditResult",
    "DistinguishingResult",
    "OneRunResult",
    "distinguishing_audit",
    "epsilon_lower_bound",
    "loss_decrease",
    "one_run_audit",
]
