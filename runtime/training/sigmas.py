"""How noisy each sample is made: one sigma in (0, 1) a (step, slot), known before the run starts.

A uniform number is drawn, evenly over strata where asked, and carried through the distribution's inverse;
so every distribution can be stratified, and none depends on a library's generator but for that number.

    uniform        s = u
    sigmoid        s = logistic(z), z standard normal (SD3's logit-normal with mean 0 and scale 1)
    logit_normal   s = logistic(mean + std * z)
    shift          sigmoid's s, moved towards noise: shift * s / (1 + (shift - 1) * s)
    family_shift   the same by the family's factor for the sample's tokens, as its sampler moves its sigmas
"""

from dataclasses import dataclass
from math import exp
from statistics import NormalDist

from runtime.config.learning import Loss
from runtime.training import draws

EDGE = 1e-4  # at 0 there is nothing to learn, at 1 nothing to see
NORMAL = NormalDist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sigmas:
    sampling: str = "sigmoid"
    mean: float = 0.0
    std: float = 1.0
    shift: float = 1.0
    low: float = 0.0
    high: float = 1.0
    strata: int | None = None
    """Of so many consecutive samples each has its sigma in another equal share of the distribution."""
    per_step: int = 1
    """Samples of a full step, by which samples are counted for the strata."""

    @classmethod
    def of(cls, loss: Loss, per_step: int) -> "Sigmas":
        return cls(
            sampling=loss.sigma_sampling,
            mean=loss.logit_mean or 0.0,
            std=1.0 if loss.logit_std is None else loss.logit_std,
            shift=loss.shift or 1.0,
            low=loss.sigma_min,
            high=loss.sigma_max,
            strata=loss.sigma_strata,
            per_step=per_step,
        )

    def draw(self, seed: int, step: int, slot: int, *, family_shift: float) -> float:
        """The sigma of a sample; `family_shift` is its family's factor for its number of tokens."""
        drawn = self._at(self._quantile(seed, step, slot), family_shift)
        return self.low + (self.high - self.low) * min(max(drawn, EDGE), 1 - EDGE)

    def _quantile(self, seed: int, step: int, slot: int) -> float:
        free = draws.uniform("sigma", seed, step, slot)
        if self.strata is None:
            return free
        turn, place = divmod((step - 1) * self.per_step + slot, self.strata)
        ranked = sorted(range(self.strata), key=lambda stratum: draws.seed_of("stratum", seed, turn, stratum))
        return (ranked[place] + free) / self.strata

    def _at(self, quantile: float, family_shift: float) -> float:
        """The inverse of the distribution's cumulative function."""
        if self.sampling == "uniform":
            return quantile
        normal = NORMAL.inv_cdf(min(max(quantile, 1e-12), 1 - 1e-12))
        if self.sampling == "logit_normal":
            return _logistic(self.mean + self.std * normal)
        sigma = _logistic(normal)
        if self.sampling == "sigmoid":
            return sigma
        shift = self.shift if self.sampling == "shift" else family_shift
        return shift * sigma / (1 + (shift - 1) * sigma)


def _logistic(value: float) -> float:
    return 1 / (1 + exp(-value))
