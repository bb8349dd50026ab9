"""The default policy of RLHFless: the number of actors of each step, and the samples of each, from forecasts. Pure.

    forecast   Each unfinished sample has a distribution of its remaining tokens (`forecasts`). The step is planned for
               a typical draw from them.
    n actors   One actor finishes a group of samples after
                   t = prefills + sum over iterations of a(B) + g x context,    B falls as samples end
               which is a closed form in the lengths (`group_times`). A step with n actors takes the longest of their
               times. It costs the sum of time x price, plus each actor's cost until the next step.
    choose n   Under each time limit, every actor takes as many of the longest samples as it can finish in time
               (`plan`). The contract selects one of these plans: the cheapest before the deadline, with a reserve
               (`estimates`); the fastest within the budget; or the least of time x its price + cost.
    mid-step   The forecasts are renewed about a dozen times per step. The actor that ends last gives half of its
               samples to one that ends sooner, if that gains at least a tenth (`rebalance`).
    between    An actor without samples stays or releases its devices, whichever costs less until it is needed again;
               the same holds for other functions (`idle`). The fleet handles turns on shared devices.

`policy.CostAware` calls these modules in order. Each returns values to the next; estimates kept across steps are in
`estimates` and `idle`. Every decision is recorded with its inputs. See docs/policies.md for the reasons and for
rejected alternatives.
"""

from rlhfless.scaling.policies.cost_aware.policy import CostAware

__all__ = ["CostAware"]
