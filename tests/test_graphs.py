"""Capture and replay on a card; without one, a clear refusal."""

import gc
import weakref

import pytest
import torch

from triaccel_bench.graphs import CaptureError, Graph, Pool, Replayed, peak_allocated, reset_peak

needs_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_without_a_card_the_refusal_says_what_to_do():
    with pytest.raises(CaptureError, match="expected a CUDA device to capture on, got none; call the function itself"):
        Graph(lambda: torch.ones(1))


@pytest.mark.gpu
@needs_card
def test_replay_reads_inputs_in_place_and_rewrites_outputs():
    value = torch.full((1000,), 2.0, device="cuda")
    calls = []

    def square():
        calls.append(None)
        return {"square": value * value}

    graph = Graph(square, warmup=2)
    assert len(calls) == 3
    for number in (3.0, 5.0):
        value.fill_(number)
        graph.outputs["square"].fill_(float("nan"))
        assert graph.replay()["square"].unique().tolist() == [number**2]
    assert len(calls) == 3


@pytest.mark.gpu
@needs_card
def test_inputs_live_as_long_as_the_graph_and_no_longer():
    value = torch.ones(10, device="cuda")
    alive = weakref.ref(value)
    graph = Graph(lambda value=value: value + 1)
    del value
    gc.collect()
    assert alive() is not None and graph.replay().tolist() == [2.0] * 10
    graph.release()
    assert alive() is None
    graph.release()
    with pytest.raises(RuntimeError, match="got a released one; capture the function again"):
        graph.replay()


@pytest.mark.gpu
@needs_card
def test_random_draws_differ_between_replays_and_follow_the_seed():
    graph = Graph(lambda: torch.rand(4, device="cuda"))
    torch.cuda.manual_seed(7)
    first, second = graph.replay().clone(), graph.replay().clone()
    torch.cuda.manual_seed(7)
    assert torch.equal(graph.replay(), first) and not torch.equal(first, second)


@pytest.mark.gpu
@needs_card
def test_memory_is_back_after_release():
    def work():
        return torch.ones(1 << 20, device="cuda").mul(2)

    Graph(work).release()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    graph = Graph(work)
    assert torch.cuda.memory_allocated() > before[0]
    graph.release()
    torch.cuda.empty_cache()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before


@pytest.mark.gpu
@needs_card
def test_shared_pool_reuses_memory():
    def work():
        return torch.ones(1 << 22, device="cuda").mul(2).sum()

    first = Graph(work)
    one = torch.cuda.memory_reserved()
    shared = Graph(work, pool=first.pool)
    two = torch.cuda.memory_reserved()
    private = Graph(work)
    assert two - one < (1 << 24) <= torch.cuda.memory_reserved() - two
    assert [float(graph.replay()) for graph in (first, shared, private)] == [2.0 * (1 << 22)] * 3
    for graph in (first, shared, private):
        graph.release()


@pytest.mark.gpu
@needs_card
@pytest.mark.parametrize("fault", ["waits for the device", "raises"])
def test_failed_capture_names_its_first_error_and_leaves_torch_usable(fault):
    stream = torch.cuda.current_stream()
    kept = []
    calls = []

    def work():
        calls.append(None)
        value = torch.ones(10, device="cuda")
        kept.append(weakref.ref(value))
        if len(calls) > 1 and fault == "raises":
            raise ValueError("odd shape")
        return value * float(value.sum()) if fault != "raises" else value

    expected = "ValueError: odd shape" if fault == "raises" else "stream is capturing"
    with pytest.raises(CaptureError, match=expected) as caught:
        Graph(work)
    assert caught.value.__context__ is None and "\n" not in str(caught.value)
    assert all(reference() is None for reference in kept)
    assert torch.cuda.current_stream() == stream
    assert torch.rand(3, device="cuda").max() < 1
    assert Graph(lambda: torch.ones(2, device="cuda") + 1).replay().tolist() == [2.0, 2.0]


@pytest.mark.gpu
@needs_card
def test_out_of_memory_under_capture_stays_out_of_memory():
    calls = []

    def work():
        calls.append(None)
        return torch.empty(1 << (50 if len(calls) > 1 else 10), dtype=torch.uint8, device="cuda")

    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        Graph(work)
    assert torch.rand(3, device="cuda").max() < 1


@pytest.mark.gpu
@needs_card
def test_fault_in_the_warm_up_passes_unchanged():
    def work():
        raise ValueError("odd shape")

    with pytest.raises(ValueError, match="odd shape"):
        Graph(work)


@pytest.mark.gpu
@needs_card
def test_a_graph_knows_its_peak_and_leaves_the_windows_alone():
    device = torch.device("cuda", 0)
    reset_peak(device)
    torch.empty(1 << 26, dtype=torch.uint8, device=device)
    before = torch.cuda.memory_allocated()

    def work():
        torch.zeros(1 << 24, dtype=torch.uint8, device=device).add_(1)

    graph = Graph(work, warmup=0)
    assert graph.peak_bytes == pytest.approx(1 << 24, rel=0.01)
    assert peak_allocated(device) == pytest.approx(before + (1 << 26), rel=0.01)
    reset_peak(device)
    assert peak_allocated(device) < before + (1 << 24)
    graph.release()


@pytest.mark.gpu
@needs_card
def test_a_pool_outlives_its_graphs_and_hands_their_memory_on():
    def work():
        torch.ones(1 << 22, device="cuda").mul_(2)

    pool = Pool()
    Graph(work, pool=pool.handle).release()
    one = torch.cuda.memory_reserved()
    for _ in range(3):
        graph = Graph(work, pool=pool.handle)
        graph.replay()
        graph.release()
    assert torch.cuda.memory_reserved() == one
    pool.release()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < one


@pytest.mark.gpu
@needs_card
def test_a_lent_pool_survives_a_failed_capture():
    value = torch.ones(1 << 20, device="cuda")

    def waits():
        return value * float(value.sum())

    pool = Pool()
    for _ in range(2):
        with pytest.raises(CaptureError, match="stream is capturing"):
            Graph(waits, pool=pool.handle)
        graph = Graph(lambda: value * 2, pool=pool.handle)
        assert float(graph.replay()[0]) == 2.0
        graph.release()
    before = torch.cuda.memory_reserved()
    pool.release()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < before


@pytest.mark.gpu
@needs_card
def test_a_replayed_function_follows_its_inputs_shapes_and_pool():
    calls = []

    def function(x, y):
        calls.append(x.shape)
        return x @ y

    replayed = Replayed(function)
    pools = Pool(), Pool()
    for pool in (None, pools[0].handle, pools[0].handle, pools[1].handle, None):
        for size in (4, 4, 6):
            x, y = torch.rand(size, size, device="cuda"), torch.rand(size, size, device="cuda")
            torch.testing.assert_close(replayed(x, y, pool=pool), x @ y)
            assert (replayed.peak_bytes > 0) == (pool is not None)
    # Without a pool 3 calls; with one, each change of shape or pool takes a warm-up and a capture.
    assert len(calls) == 3 + 2 * 2 + 2 * 2 + 2 * 2 + 3 and replayed.eager_reason is None
    for pool in pools:
        pool.release()
