"""RLHFless's own policy: plans a step from forecasts under the contract, and replans it while the step runs. Pure.

    step began   forecasters   remaining lengths of the samples, as distributions
                 deadline      the margin of time that the step keeps before its deadline
                 planner       typical draw -> actors and their samples, longest first; starts for later steps
                 completion    when each actor ends (compiled: counting, kernel)
    beat         replan        new forecasts; migration: the actor that ends last is relieved where that pays
                 idle          an actor without samples stays or is released
    lost         samples go to the actors with the least; the next beat replans
    generated    all actors are idle until the next step, and start ahead of it
    idle         another function is idle; it stays or is released

`policy.CostAware` calls them in this order. Each returns values to the next; estimates that are kept from step to
step are in `estimators` and `deadline`, and formulae are in the docstrings of the functions that compute them. Every
decision is noted with its inputs.
"""

from rlhfless.scaling.policies.cost_aware.policy import CostAware

__all__ = ["CostAware"]
