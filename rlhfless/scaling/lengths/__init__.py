"""Forecasts of response lengths: a distribution for each unfinished sample of a step. Pure.

**The model.** The log length of sample j of prompt i is normal around the prompt's level, and levels are normal around
the run's mean:

    log L_ij ~ N(m_i, s^2),    m_i ~ N(mu, b^2)

`mu`, `s` and `b` are averages over the run's samples, in which a step counts 0.9 of the step after it. A prompt's level
is remembered as its distance from `mu`, so that all levels follow when the responses of a run grow longer; from one
visit to the next, the level may drift (`DRIFT_VARIANCE`).

**The data.** A response that ended by itself is a known length. A response that was truncated after t tokens, or is
still running there, is known to be longer than t: it pulls its prompt's level up, the more the further t is beyond that
level (`levels.update`). Such a sample can never lower a level.

**A forecast** of a sample that has t tokens so far (`LengthPredictor.forecast`): the level of its prompt after all
samples of this step, N(a, v), gives log L ~ N(a, v + s^2), of which the part beyond log t is left. So while tokens are
drawn, a forecast changes in two ways: the sample's own tokens rule out shorter lengths, and its siblings, those that
ended and those that go on, move the level. A prompt that was never seen has the level N(mu, b^2). In mid-step `mu`, `s`
and `b` are those of the earlier steps, because the samples that end first are the short ones
(`LengthPredictor.learn` takes the step when it has ended).

**What was left out**, because neither forecasts (rank correlation, pinball loss) nor steps (time, cost) were better
with it in ten simulated scenarios: learned shapes of the distribution (Kaplan-Meier) in place of the normal one, a
spread for each prompt, a learned drift, and evidence without the sample's own tokens for its own forecast. Forecasts
without the step's running samples lost 6 % (pinball loss at half time); those without siblings 0.17 of rank
correlation.

Deterministic: the same steps give the same forecasts, so a resumed run learns its trace again
(rlhfless.orchestrator.prompt_selection).
"""

from rlhfless.scaling.lengths.forecast import QUANTILE_LEVELS, Forecast, StepSamples
from rlhfless.scaling.lengths.predictor import LengthPredictor

__all__ = ["QUANTILE_LEVELS", "Forecast", "LengthPredictor", "StepSamples"]
