"""When a run is of no use any more, whatever it would do next."""

from __future__ import annotations

from triaccel_bench.reading import Reading
from triaccel_bench.records import EpochRecord


class Diverged(RuntimeError):
    """Too many non-finite steps in a row, or a last epoch that applied no step or ends in a loss that is not finite."""


def check_skips(reading: Reading, limit: int) -> None:
    """Raises ``Diverged`` where as many steps in a row were skipped."""
    if reading.longest_skip_run >= limit:
        raise Diverged(
            f"{reading.longest_skip_run} steps in a row had non-finite gradients, "
            f"method.loss_scale.max_consecutive_skips={limit}; lower optimizer.lr or check the data"
        )


def check_end(last: EpochRecord) -> None:
    """Raises ``Diverged`` where the last epoch left nothing to go by."""
    if last.steps_skipped == last.steps or last.evaluation_loss is None:
        raise Diverged(
            f"the last epoch skipped {last.steps_skipped} of {last.steps} steps and its evaluation loss is "
            f"{last.evaluation_loss}; lower optimizer.lr or check the data"
        )
