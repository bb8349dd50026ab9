"""RLHFless's own policy: the number of actors of each step, and the samples of each, from forecasts. Pure.

    forecast   Each unfinished sample has a distribution of its remaining tokens (`forecasts`). The step is planned for
               a typical draw of them.
    n actors   One actor ends a group of samples after
                   t = prefills + sum over iterations of a(B) + g x context,    B falls as samples end
               which is a closed form in the lengths (`group_times`). A step with n actors takes the longest of their
               times and costs the sum of time x price, and for each actor its cost until the next step.
    choose n   Under each time limit every actor takes as many of the longest samples as it can end in time (`plan`). Of
               these plans the contract takes one: the cheapest before the deadline, with a reserve (`estimates`); the
               fastest within the budget; or the least of time x its price + cost.
    mid-step   About a dozen times a step the forecasts are made again. The actor that ends last gives half of its
               samples to one that ends sooner, where that gains a tenth (`rebalance`).
    between    An actor without samples stays, or gives its devices back, whichever costs less until it is needed
               again; other functions do, too (`idle`). Turns on shared devices are the fleet's.

`policy.CostAware` calls them in this order. Each returns values to the next; estimates that last from step to step are
in `estimates` and `idle`. Every decision is noted with its inputs. docs/policies.md has the reasons, and what was left
out.
"""

from rlhfless.scaling.policies.cost_aware.policy import CostAware

__all__ = ["CostAware"]
