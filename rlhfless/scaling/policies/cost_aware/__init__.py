"""The run's own scaler: plans a step from forecasts under the contract, and replans it while the step runs. Pure.

    step began   forecasters   lengths that samples have still to draw, as distributions
                 deadline      how much of its time the step keeps in reserve
                 planner       typical draw -> actors and their samples, longest first; prewarm: starts for later steps
                 completion    when each actor ends (compiled: counting, kernel)
    beat         replan        everything is forecast again; migration: actors are dissolved and relieved where that
    pays
                 idle          an actor without samples stays, sleeps or gives its devices back
    lost         samples go to the actors with the least; the next beat replans
    generated    all actors are idle until the next step, and start ahead of it
    idle         a function beside generation is idle, and starts ahead of its next use

`policy.CostAware` calls them in this order. Values go from one to the next; what is learned from step to step is in
`estimators` and `deadline`, and formulae are in the docstrings of the functions that compute them. Every decision is
noted with what it was made from.
"""

from rlhfless.scaling.policies.cost_aware.policy import CostAware

__all__ = ["CostAware"]
