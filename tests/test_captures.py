"""What captured calls share and lend, told without a card; that they are captured is test_gpu's."""

from contextlib import nullcontext

import pytest
import torch

from triaccel_bench import captures
from triaccel_bench.graphs import CaptureError


class StandIn:
    """A pool that needs no card."""

    spoilt = False

    @property
    def handle(self):
        if self.spoilt:
            raise CaptureError("its anchor cannot be captured again")
        return id(self)

    def release(self):
        """Nothing is held."""


@pytest.fixture
def calls(monkeypatch):
    monkeypatch.setattr(captures, "Pool", StandIn)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return lambda eager=None, tight=False: captures.CapturedCalls(
        torch.device("cuda", 0), eager, 8, tight, lambda: None
    )


def test_a_pool_is_lent_before_anything_is_captured_and_anew_once_it_was_given_up(calls):
    made = calls()
    lent = made.lend_pool()
    assert lent is not None and made.lend_pool() == lent
    assert made.give_up() and not made.give_up()
    assert made.lend_pool() is not None


def test_no_pool_is_lent_where_it_may_go_or_nothing_is_captured(calls):
    assert calls(tight=True).lend_pool() is None and calls(eager="asked for").lend_pool() is None
    made = calls()
    made.lend_pool()
    made.eager_reason = "a step cannot be captured"
    assert made.lend_pool() is None
    spoilt = calls()
    spoilt.lend_pool()
    spoilt._pool.spoilt = True
    assert spoilt.lend_pool() is None
