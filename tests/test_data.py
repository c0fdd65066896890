from __future__ import annotations

import random
import sys

import numpy as np
import pytest
import torch
from fabricated import check_whole, images, message_of, settings, write_npz
from torchvision.transforms import functional as reference

from triaccel_bench.data import MIN_LEFTOVER, DeviceData, ElasticSampler, ImageSet, draw, load

PLACES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]


def image_set(count: int, side: int = 32) -> ImageSet:
    x = torch.from_numpy(images(count + 10, side)).permute(0, 3, 1, 2).contiguous()
    y = torch.arange(count + 10) % 10
    return ImageSet(x[:count], y[:count], x[count:], y[count:], tuple("0123456789"), "0" * 16, "test")


@pytest.mark.parametrize("n", [*range(1, 41), 97, 1000])
def test_every_index_comes_exactly_once_whatever_sizes_are_asked(n):
    sizes = random.Random(n)
    for epoch in range(5):
        sampler = ElasticSampler(n, seed=1, epoch=epoch, device="cpu")
        seen: list[int] = []
        while sampler.remaining:
            asked = sizes.randint(2, 50)
            batch = sampler.take(asked)
            seen += batch.tolist()
            assert sampler.taken == len(seen) and sampler.remaining == n - len(seen)
            assert len(batch) <= asked + MIN_LEFTOVER - 1
            assert len(batch) >= min(asked, MIN_LEFTOVER, n), "a leftover too small for BatchNorm"
        assert sorted(seen) == list(range(n))


@pytest.mark.parametrize(
    ("n", "size", "expected"),
    [(97, 96, [97]), (103, 96, [103]), (104, 96, [96, 8]), (7, 96, [7]), (1, 96, [1]), (192, 96, [96, 96]),
     (1437, 96, [96] * 14 + [93])],
)  # fmt: skip
def test_a_small_leftover_joins_the_batch_before_it(n, size, expected):
    sampler = ElasticSampler(n, 0, 0, "cpu")
    sizes = []
    while sampler.remaining:
        sizes.append(len(sampler.take(size)))
    assert sizes == expected


def test_a_changed_size_holds_from_the_next_batch_on_and_keeps_the_order():
    whole = ElasticSampler(60, 3, 2, "cpu").take(60)
    sampler = ElasticSampler(60, 3, 2, "cpu")
    batches = [sampler.take(size) for size in (16, 8, 24, 12)]
    assert [len(batch) for batch in batches] == [16, 8, 24, 12]
    assert torch.equal(torch.cat(batches), whole)
    assert not hasattr(sampler, "__len__"), "a stated number of batches would be wrong"


def test_the_order_follows_seed_and_epoch_alone():
    order = {key: tuple(ElasticSampler(50, *key, "cpu").take(50).tolist()) for key in ((0, 0), (0, 1), (1, 0), (1, 1))}
    assert len(set(order.values())) == 4
    torch.manual_seed(99)
    assert tuple(ElasticSampler(50, 0, 1, "cpu").take(50).tolist()) == order[0, 1]


def test_an_epoch_goes_on_where_another_process_left_it():
    first = ElasticSampler(100, 0, 0, "cpu")
    first.take(30)
    second = ElasticSampler(100, 0, 0, "cpu")
    second.take(first.taken)
    assert torch.equal(first.take(40), second.take(40))


def test_taking_is_slicing():
    sampler = ElasticSampler(100, 0, 0, "cpu")
    first, second = sampler.take(30), sampler.take(20)
    assert first.dtype == torch.int64
    assert second.data_ptr() == first.data_ptr() + 30 * 8


def test_an_order_on_the_device_is_handed_out_as_it_stands():
    order = torch.arange(99, -1, -1)
    sampler = ElasticSampler(100, 0, 0, "cpu", order)
    assert sampler.take(30).data_ptr() == order.data_ptr()
    assert torch.equal(sampler.take(65), order[30:]) and sampler.remaining == 0


def test_sampler_refuses_to_go_past_the_end_and_empty_batches():
    sampler = ElasticSampler(10, 0, 0, "cpu")
    with pytest.raises(ValueError, match="size=0: expected at least 1"):
        sampler.take(0)
    sampler.take(10)
    with pytest.raises(IndexError, match="all 10 samples of this epoch were taken"):
        sampler.take(4)


def reference_image(pixels, flip, top, left, dataset, input_size):
    side = pixels.shape[-1]
    cropped = reference.crop(reference.pad(pixels, [dataset.crop_padding]), int(top), int(left), side, side)
    cropped = reference.hflip(cropped) if flip else cropped
    image = reference.normalize(cropped.float() / 255, dataset.mean, dataset.std)
    if input_size != side:
        image = reference.resize(image, [input_size, input_size], antialias=False)
    return image


@pytest.mark.parametrize(
    ("side", "padding", "flip", "input_size"),
    [(32, 4, True, 32), (32, 4, False, 32), (8, 3, True, 8), (8, 11, True, 8), (32, 0, True, 32), (8, 2, True, 20)],
)
def test_batches_equal_torchvisions_transforms_one_image_at_a_time(side, padding, flip, input_size):
    dataset = settings(image_size=side, crop_padding=padding, flip=flip)
    source = image_set(60, side)
    data = DeviceData(source, dataset, input_size, "cpu")
    draws = draw(60, dataset, seed=5, epoch=1, device="cpu")
    indices = ElasticSampler(60, 5, 1, "cpu").take(37)
    x, y = data.train_batch(indices, draws)
    expected = torch.stack([
        reference_image(source.x_train[i], draws.flip[i], draws.top[i], draws.left[i], dataset, input_size)
        for i in indices.tolist()
    ])  # fmt: skip
    assert x.dtype == torch.float32 and x.shape == (37, 3, input_size, input_size)
    torch.testing.assert_close(x, expected, rtol=0, atol=2e-6)
    assert torch.equal(y, source.y_train[indices])


def test_a_batch_does_not_change_the_stored_images():
    source = image_set(40)
    before = source.x_train.clone()
    data = DeviceData(source, settings(), 32, "cpu")
    data.train_batch(torch.arange(40), draw(40, settings(), 0, 0, "cpu"))
    data.plain_batch(torch.arange(40))
    list(data.eval_batches(10))
    assert torch.equal(data.x_train, before) and data.x_train.dtype == torch.uint8


def test_an_image_looks_the_same_whatever_batch_it_comes_in():
    dataset = settings()
    data = DeviceData(image_set(64), dataset, 32, "cpu")
    draws = draw(64, dataset, 0, 0, "cpu")

    def epoch(sizes):
        sampler, seen = ElasticSampler(64, 0, 0, "cpu"), {}
        for size in sizes:
            indices = sampler.take(size)
            seen |= dict(zip(indices.tolist(), data.train_batch(indices, draws)[0]))
        return torch.stack([seen[i] for i in range(64)])

    assert torch.equal(epoch([64]), epoch([10, 30, 9, 15]))


def test_draws_cover_every_offset_and_follow_seed_and_epoch_alone():
    draws = draw(4000, settings(crop_padding=2), 0, 0, "cpu")
    assert draws.flip.dtype == torch.bool and draws.top.dtype == draws.left.dtype == torch.int64
    for offsets in (draws.top, draws.left):
        assert torch.bincount(offsets).tolist() == pytest.approx([800] * 5, abs=120)
    assert not torch.equal(draws.top, draws.left)
    assert draws.flip.float().mean().item() == pytest.approx(0.5, abs=0.04)
    again = draw(4000, settings(crop_padding=2), 0, 0, "cpu")
    assert torch.equal(again.flip, draws.flip) and torch.equal(again.top, draws.top)
    for seed, epoch in ((1, 0), (0, 1)):
        assert not torch.equal(draw(4000, settings(crop_padding=2), seed, epoch, "cpu").flip, draws.flip)


def test_without_flips_the_crops_stay():
    on, off = (draw(500, settings(flip=flip), 0, 0, "cpu") for flip in (True, False))
    assert not off.flip.any() and torch.equal(on.top, off.top) and torch.equal(on.left, off.left)


def test_order_and_augmentation_draw_from_streams_of_their_own(monkeypatch):
    seeds = []

    def spy(original):
        def call(*args, generator, **kwargs):
            seeds.append(generator.initial_seed())
            return original(*args, generator=generator, **kwargs)

        return call

    for name in ("randperm", "randint"):
        monkeypatch.setattr(torch, name, spy(getattr(torch, name)))
    for seed in range(3):
        for epoch in range(3):
            ElasticSampler(20, seed, epoch, "cpu")
            draw(20, settings(), seed, epoch, "cpu")
    assert len(seeds) == len(set(seeds)) == 18


def test_nothing_on_the_training_path_needs_a_value_on_the_host():
    # A meta tensor has no values: .item(), nonzero and boolean indexing all fail on it.
    dataset = settings()
    data = DeviceData(image_set(40), dataset, 48, "meta")
    sampler = ElasticSampler(40, 0, 0, "meta")
    draws = draw(40, dataset, 0, 0, "meta")
    assert data.train_batch(sampler.take(16), draws)[0].shape == (16, 3, 48, 48)
    assert data.plain_batch(sampler.take(16))[0].shape == (16, 3, 48, 48)
    x, y = data.input_buffers(24)
    data.fill(x, y, data.begin_epoch(0, 1).take(24))


def written_out(source: ImageSet, dataset, indices, draws) -> torch.Tensor:
    """Training images by the arithmetic, in its order: a table or a kernel must not change a bit."""
    side, mean, std = source.x_train.shape[-1], torch.tensor(dataset.mean), torch.tensor(dataset.std)
    padded = torch.nn.functional.pad(source.x_train, [dataset.crop_padding] * 4)
    crops = [
        padded[i, :, draws.top[i] : draws.top[i] + side, draws.left[i] : draws.left[i] + side] for i in indices.tolist()
    ]
    pixels = torch.stack([crop.flip(-1) if draws.flip[i] else crop for i, crop in zip(indices.tolist(), crops)])
    return pixels.float().div_(255).sub_(mean.view(3, 1, 1)).div_(std.view(3, 1, 1))


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_filled_buffers_hold_the_batch_of_the_current_epoch(dtype, channels_last):
    dataset, source = settings(), image_set(60)
    data = DeviceData(source, dataset, 32, "cpu", channels_last=channels_last)
    x, y = data.input_buffers(33, dtype)
    assert x.dtype == dtype and x.shape == (33, 3, 32, 32) and y.dtype == torch.int64 and y.shape == (33,)
    assert x.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    for epoch in (1, 2):
        indices = data.begin_epoch(7, epoch).take(33)
        draws = draw(60, dataset, 7, epoch, "cpu")
        assert torch.equal(indices, ElasticSampler(60, 7, epoch, "cpu").take(33))
        data.fill(x, y, indices)
        expected = written_out(source, dataset, indices, draws)
        assert torch.equal(x, expected.to(dtype)) and torch.equal(y, source.y_train[indices])
        assert torch.equal(data.train_batch(indices, draws)[0], expected)


@pytest.mark.parametrize("place", PLACES)
def test_an_epochs_state_stays_where_it_is_and_holds_the_draws(place):
    dataset = settings()
    data = DeviceData(image_set(60), dataset, 32, place)
    state = (data.order, data.flip, data.top, data.left)
    addresses = [tensor.data_ptr() for tensor in state]
    assert [tensor.dtype for tensor in state] == [torch.int64, torch.bool, torch.int16, torch.int16]
    data.prepare(0, 1)
    assert data.order.tolist() == list(range(60)) and not data.flip.any(), "preparing changed the current epoch"
    # As prepared, prepared for another epoch in vain, prepared twice, not prepared, and one of another seed.
    for seed, epoch, prepared in ((0, 1, []), (0, 2, [3]), (0, 3, [3, 3]), (0, 4, []), (1, 4, [4])):
        for other in prepared:
            data.prepare(0, other)
        sampler = data.begin_epoch(seed, epoch)
        expected = draw(60, dataset, seed, epoch, "cpu")
        assert torch.equal(data.order.cpu(), ElasticSampler(60, seed, epoch, "cpu").take(60))
        assert torch.equal(data.flip.cpu(), expected.flip)
        assert torch.equal(data.top.cpu().long(), expected.top) and torch.equal(data.left.cpu().long(), expected.left)
        assert [tensor.data_ptr() for tensor in (data.order, data.flip, data.top, data.left)] == addresses
        assert sampler.take(20).data_ptr() == addresses[0] and sampler.remaining == 40


def test_before_the_first_epoch_samples_come_as_they_are():
    data = DeviceData(image_set(20), settings(), 32, "cpu")
    x, y = data.input_buffers(20)
    data.fill(x, y, data.order)
    plain = data.plain_batch(torch.arange(20))
    assert torch.equal(x, plain[0]) and torch.equal(y, plain[1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_a_captured_batch_follows_the_epochs(kernels):
    dataset, source = settings(), image_set(200)
    data = DeviceData(source, dataset, 32, "cuda", kernels, channels_last=True)
    x, y = data.input_buffers(96, torch.float16)
    indices = torch.empty(96, dtype=torch.int64, device="cuda")
    indices.copy_(data.begin_epoch(0, 0).take(96))
    data.fill(x, y, indices)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        data.fill(x, y, indices)
    for epoch in (1, 2):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            data.prepare(0, epoch)
            indices.copy_(data.begin_epoch(0, epoch).take(96))
            graph.replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        taken = ElasticSampler(200, 0, epoch, "cpu").take(96)
        expected = written_out(source, dataset, taken, draw(200, dataset, 0, epoch, "cpu"))
        assert torch.equal(x.cpu(), expected.half()) and torch.equal(y.cpu(), source.y_train[taken])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_draws_are_not_overwritten_before_they_are_copied():
    data = DeviceData(image_set(1000), settings(), 32, "cuda")
    seen = []
    torch.cuda._sleep(200_000_000)
    for epoch in range(20):
        data.begin_epoch(0, epoch)
        seen.append(data.order.clone())
    for epoch, order in enumerate(seen):
        assert torch.equal(order.cpu(), ElasticSampler(1000, 0, epoch, "cpu").take(1000))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_no_synchronisation_on_the_device_and_equal_to_the_cpu():
    dataset = settings()
    source = image_set(200)
    result = {}
    for device in ("cpu", "cuda"):
        data = DeviceData(source, dataset, 32, device)
        sampler, draws = ElasticSampler(200, 0, 0, device), draw(200, dataset, 0, 0, device)
        torch.cuda.set_sync_debug_mode("error" if device == "cuda" else "default")
        try:
            result[device] = data.train_batch(sampler.take(96), draws)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(result["cuda"][0].cpu(), result["cpu"][0])
    assert torch.equal(result["cuda"][1].cpu(), result["cpu"][1])


@pytest.mark.parametrize("size", [1, 7, 10, 1000])
def test_evaluation_sees_every_image_once_in_order(size):
    source = image_set(20)
    batches = list(DeviceData(source, settings(), 32, "cpu").eval_batches(size))
    x, y = (torch.cat(parts) for parts in zip(*batches))
    assert torch.equal(y, source.y_eval) and len(batches) == -(-10 // size)
    expected = reference.normalize(source.x_eval.float() / 255, settings().mean, settings().std)
    torch.testing.assert_close(x, expected, rtol=0, atol=1e-6)


def test_evaluation_batches_come_in_the_dtype_and_layout_asked_for():
    source = image_set(20)
    (whole, _), (x, y) = (
        next(DeviceData(source, settings(), 32, "cpu", channels_last=last).eval_batches(7, dtype))
        for last, dtype in ((False, torch.float32), (True, torch.float16))
    )
    assert torch.equal(x, whole.half()) and x.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(y, source.y_eval[:7])


def test_plain_batch_is_the_stored_image_normalised_and_resized():
    source = image_set(20, side=8)
    data = DeviceData(source, settings(image_size=8), 16, "cpu")
    x, y = data.plain_batch(torch.tensor([3, 3, 0]))
    expected = reference_image(source.x_train[3], False, 4, 4, settings(), 16)
    torch.testing.assert_close(x[1], expected, rtol=0, atol=2e-6)
    assert torch.equal(x[0], x[1]) and y.tolist() == [3, 3, 0]


def test_counts_and_resident_bytes():
    data = DeviceData(image_set(40), settings(), 224, "cpu")
    assert (data.train_count, data.eval_count) == (40, 10)
    assert data.bytes == 50 * (3 * 32 * 32 + 8)
    assert sum(tensor.nbytes for tensor in (data.order, data.flip, data.top, data.left)) == 40 * 13


def test_digits_are_a_fixed_stratified_split():
    pytest.importorskip("sklearn")
    dataset = settings(name="digits", train_size=1437, test_size=360)
    loaded = load(dataset)
    check_whole(loaded, 1437, 360)
    assert torch.bincount(loaded.y_eval).tolist() == [36, 37, 35, 37, 36, 36, 36, 36, 35, 36]
    assert torch.equal(loaded.x_train[:, 0], loaded.x_train[:, 2]) and loaded.x_train.max() == 255
    assert load(dataset).fingerprint == loaded.fingerprint


def test_synthetic_is_learnable_and_repeats():
    dataset = settings(name="synthetic", train_size=300, test_size=100, num_classes=7)
    loaded = load(dataset)
    check_whole(loaded, 300, 100)
    train, test = loaded.x_train.float().flatten(1), loaded.x_eval.float().flatten(1)
    centres = torch.stack([train[loaded.y_train == label].mean(0) for label in range(7)])
    assert (torch.cdist(test, centres).argmin(1) == loaded.y_eval).float().mean() > 0.95
    assert not torch.equal(loaded.x_train[0], loaded.x_train[7]), "noise differs within a class"
    assert load(dataset).fingerprint == loaded.fingerprint


def test_fingerprint_sees_one_pixel_one_label_and_the_split(tmp_path):
    other = images(40)
    other[5, 0, 0, 0] ^= 1
    labels = np.arange(40) % 10
    labels[0] = 1
    paths = [
        write_npz(tmp_path / "a.npz"),
        write_npz(tmp_path / "b.npz", x_train=other),
        write_npz(tmp_path / "c.npz", y_train=labels),
    ]
    prints = [load(settings(path=path)).fingerprint for path in paths]
    prints += [load(settings(path=paths[0], validation_fraction=0.25)).fingerprint]
    assert len(set(prints)) == 4
    write_npz(tmp_path / "d.npz", x_train=images(40).transpose(0, 3, 1, 2))
    assert load(settings(path=str(tmp_path / "d.npz"))).fingerprint == prints[0], "the layout on disk does not count"


def test_validation_images_are_stratified_and_never_trained_on(tmp_path):
    path = write_npz(tmp_path / "a.npz")
    on_test = load(settings(path=path, validation_fraction=0.25))
    on_validation = load(settings(path=path, validation_fraction=0.25, evaluate_on="validation"))
    check_whole(on_test, train=30)
    check_whole(on_validation, train=30, test=10)
    assert torch.equal(on_test.x_train, on_validation.x_train)
    assert sorted(on_validation.y_eval.tolist()) == list(range(10))
    stored = {pixels.tobytes() for pixels in images(40).transpose(0, 3, 1, 2).copy()}
    train = {pixels.numpy().tobytes() for pixels in on_validation.x_train}
    held = {pixels.numpy().tobytes() for pixels in on_validation.x_eval}
    assert train | held == stored and not train & held
    assert np.array_equal(on_test.x_eval.permute(0, 2, 3, 1).numpy(), images(20, seed=1))


@pytest.mark.parametrize("fraction", [0.005, 0.97, 0.995])
def test_a_validation_share_that_leaves_one_side_empty_is_refused(tmp_path, fraction):
    message = message_of(settings(path=write_npz(tmp_path / "a.npz"), validation_fraction=fraction))
    assert f"dataset.validation_fraction={fraction}" in message and "change the fraction" in message


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_data_sets_without_files_refuse_a_path(name, tmp_path):
    message = message_of(settings(name=name, path=str(tmp_path)))
    assert f"dataset.path={tmp_path}: expected null" in message and "remove dataset.path" in message


def test_synthetic_needs_sizes():
    assert "got null; set both" in message_of(settings(name="synthetic", test_size=None))


def test_a_single_training_image_is_refused(tmp_path):
    path = write_npz(tmp_path / "a.npz", x_train=images(1), y_train=np.zeros(1, int))
    assert "at least 2 train images" in message_of(settings(path=path, train_size=None))


@pytest.mark.parametrize("error", [MemoryError("cannot allocate 6.3 TB"), RuntimeError("can't allocate memory\nmore")])
def test_images_that_do_not_fit_into_memory_are_refused(monkeypatch, error):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(torch, "randint", fail)
    message = message_of(settings(name="synthetic"))
    assert str(error).split("\n")[0] in message and "lower dataset.train_size" in message and "\n" not in message


def test_digits_without_scikit_learn_name_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert "pip install scikit-learn" in message_of(settings(name="digits"))
