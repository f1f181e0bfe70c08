"""What becomes of an update whose loss or gradients are not finite."""

from __future__ import annotations

import logging
from typing import Literal

from parallel_engine.errors import NonFiniteError

log = logging.getLogger("parallel_engine")
OnNonFinite = Literal["error", "skip"]
_MAX_OVERFLOWS = 32
"""In a row, of fp16's scaler: it begins at 2 ** 16 and halves its scale with each."""


class NonFinite:
    """Raises or counts; one per engine. All that it sees is the same on every rank."""

    def __init__(self, policy: OnNonFinite) -> None:
        self._policy = policy
        self._overflows = 0
        self.num_skipped = 0
        """Updates left out so far."""

    def must_skip(self, loss: float, norm: float, *, scaled: bool) -> bool:
        """Whether the update is left out. `scaled` says that fp16's scaler is at work.

        Raises:
            NonFiniteError: a value is not finite and the policy is "error".
        """
        loss_is_finite = abs(loss) < float("inf")
        if loss_is_finite and norm < float("inf"):
            self._overflows = 0
            return False
        self.num_skipped += 1
        if loss_is_finite and scaled:
            # Gradients overflow fp16 until the scaler has found its scale.
            self._overflows += 1
            if self._overflows <= _MAX_OVERFLOWS:
                log.info("gradients overflow fp16; update skipped, the loss scale is halved")
                return True
        message = (
            f"loss = {loss}, gradient norm = {norm}: not finite, before the update. Look at the "
            "data, or use a lower learning rate"
        )
        if self._policy == "error":
            raise NonFiniteError(message)
        log.warning("%s; update skipped (%d so far)", message, self.num_skipped)
        return True
