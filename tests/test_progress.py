"""Lines of progress: what is said of the time left."""

from __future__ import annotations

from measured import epoch

from triaccel_bench.progress import Plain


def test_time_left_counts_epochs_and_not_what_came_before_the_first(capsys):
    clock = [0.0]
    reporter = Plain(lambda: clock[0])
    for first in (1, 11):
        reporter.start("run", "off")
        clock[0] += 300.0  # of compiling
        for number, seconds in ((first, 5.0), (first + 1, 7.0)):
            clock[0] += seconds
            told = epoch(number, train_seconds=4.0, evaluation_seconds=1.0)
            reporter.epoch(told.model_dump(), epochs=20)
    left = [line.split()[-2] for line in capsys.readouterr().out.splitlines()]
    assert left == ["1:35", "1:48", "0:45", "0:48"]
