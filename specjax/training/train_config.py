"""How long a training run is, and what happens on the way: reports, checkpoints, evaluations.

A run that has a time instead of a number of steps gets that number while it warms up, from the speed that it then has: the learning rate of
the warm-up does not depend on how many steps follow, so the cosine after it reaches its end when the time is over.
"""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import jax
import numpy as np

from specjax.checks import require_size

# Steps whose time tells a run's speed: about as many as a report has.
_MEASURED_STEPS = 30
# More than any run has.
_ENDLESS = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A run.

    Attributes:
        num_steps: Training steps: the learning rate follows its course over them, and then the run ends. With `max_seconds`, the most.
        max_seconds: Time for training steps alone, without compiling, checkpoints and evaluations. It is made a number of steps by the
            speed of the first ones, and the run keeps to that number.
        report_every: Steps between reports. Each waits for the devices.
        checkpoint_every: Steps between checkpoints; `None` makes none. There is one at the end, a report before each, and with
            `max_seconds` none until the number of steps is known.
        evaluations: How often the drafters are evaluated, evenly spread over the steps, the last time at the end; 0 is never.
        compile_threads: Drafters whose steps are compiled at a time.

    Raises:
        ValueError: A number outside its range, or neither steps nor a time.
    """

    num_steps: int | None = None
    max_seconds: float | None = None
    report_every: int = 20
    checkpoint_every: int | None = 1000
    evaluations: int = 0
    compile_threads: int = 8

    def __post_init__(self) -> None:
        for name in ("num_steps", "report_every", "checkpoint_every", "compile_threads"):
            value = getattr(self, name)
            if value is not None or name in ("report_every", "compile_threads"):
                require_size(f"TrainConfig.{name}", value)
        if self.num_steps is None and self.max_seconds is None:
            raise ValueError("TrainConfig needs num_steps or max_seconds, got neither")
        if self.max_seconds is not None and not 0 < self.max_seconds < math.inf:
            raise ValueError(f"TrainConfig.max_seconds must be above 0, got {self.max_seconds!r}")
        if not isinstance(self.evaluations, int) or self.evaluations < 0:
            raise ValueError(f"TrainConfig.evaluations must be an int of at least 0, got {self.evaluations!r}")


class RunLength:
    """The number of training steps of a run in progress, and when its drafters are evaluated.

    Args:
        config: The run's.
        step: Training steps done already.
        num_steps: Known from a checkpoint; `None` if there is none.
        warmup_steps: The shortest warm-up of the drafters.

    Attributes:
        num_steps: `None` until it is known.
    """

    def __init__(self, config: TrainConfig, *, step: int, num_steps: int | None, warmup_steps: int) -> None:
        self.num_steps = config.num_steps if config.max_seconds is None else num_steps
        self._config, self._first_step = config, step + 1
        # After the first step, all at learning rates that any number of steps has. Without a warm-up the second step is at the highest.
        self._measured_steps, self._began = max(min(_MEASURED_STEPS, warmup_steps), 1), 0.0

    @property
    def for_learning_rate(self) -> np.int32:
        """The number, or one so large that the learning rate stays where its warm-up ends."""
        return np.int32(_ENDLESS if self.num_steps is None else self.num_steps)

    def is_over(self, step: int) -> bool:
        """Whether all steps are done when so many are."""
        return self.num_steps is not None and step >= self.num_steps

    def evaluates_after(self, step: int) -> bool:
        """Whether the drafters are evaluated when so many steps are done."""
        if self.num_steps is None or not step:
            return False
        return step * self._config.evaluations // self.num_steps > (step - 1) * self._config.evaluations // self.num_steps

    def step_done(self, step: int, metrics: Any) -> bool:
        """Measures the speed. Returns whether the number of steps has just become known.

        Args:
            step: Training steps done.
            metrics: Of this step, waited for where its time matters.
        """
        config = self._config
        if self.num_steps is not None or config.max_seconds is None:
            return False
        if step == self._first_step:
            jax.block_until_ready(metrics)
            self._began = time.perf_counter()
        elif step == self._first_step + self._measured_steps:
            jax.block_until_ready(metrics)
            seconds_a_step = (time.perf_counter() - self._began) / self._measured_steps
            self.num_steps = max(min(int(config.max_seconds / seconds_a_step), config.num_steps or _ENDLESS), step)
        elif step == config.num_steps:
            self.num_steps = step
        return self.num_steps is not None
