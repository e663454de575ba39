"""What has a meaning on a GPU alone: streams, graphs, several devices, very large tensors."""

import pytest
import torch
from reference import Sample, assert_matches_float64, same_bits, sample_inputs

SLEEP_CYCLES = 100_000_000  # about 50 ms: far longer than it takes to enqueue what comes after


def on_side_stream(action, sample):
    """action(x) with x written by a side stream after a long sleep; a kernel on any other stream reads NaNs."""
    side = torch.cuda.Stream()
    x = torch.full_like(sample.input, float("nan"))
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP_CYCLES)
        x.copy_(sample.input)
        y = action(x)
    side.synchronize()
    return y


def test_case_42_launches_on_the_current_stream(kernel, cuda):
    sample = sample_inputs(kernel, cuda, (5, 1025))
    x, weight, bias, eps = sample
    out = torch.empty_like(x)
    actions = {
        "default": lambda t: kernel.op(t, weight, bias, eps),
        "out": lambda t: kernel.op.out(t, weight, bias, eps, out=out) or out,
        "scalar": lambda t: kernel.op.scalar(t, 1.5, 0.5),
    }
    for action in actions.values():
        expected = action(x).clone()  # also loads the kernel, which may synchronize
        out.fill_(7.0)
        assert same_bits(on_side_stream(action, sample), expected)


def test_copies_of_a_strided_input_are_made_on_the_current_stream(kernel, cuda):
    sample = sample_inputs(kernel, cuda, (64, 64))
    expected = kernel.op(sample.input.t(), *sample[1:])
    assert same_bits(on_side_stream(lambda t: kernel.op(t.t(), *sample[1:]), sample), expected)


@pytest.mark.slow
@pytest.mark.kernels(items=8, access=8)
def test_case_42_reduce_overhead_of_a_linear_before_the_op(kernel, cuda, inductor, fresh_compiler):
    weight, bias = sample_inputs(kernel, cuda, (64,))[1:3]
    linear = torch.nn.Linear(32, 64, device=cuda, dtype=kernel.dtype)
    compiled = torch.compile(lambda t: kernel.op(linear(t), weight, bias), mode="reduce-overhead", fullgraph=True)
    with torch.no_grad():
        for seed in range(4):  # the graph is recorded in the second call
            x = sample_inputs(kernel, cuda, (5, 32), seed=seed).input
            got = compiled(x).clone()
            hidden = linear(x)
            assert_matches_float64(kernel, kernel.op(hidden, weight, bias), hidden, weight, bias)
            torch.testing.assert_close(got, kernel.op(hidden, weight, bias), atol=2e-2, rtol=2e-2)


def test_graph_replay_sees_new_values(kernel, cuda):
    first, second = (sample_inputs(kernel, cuda, (5, 1025), seed=seed) for seed in range(2))
    x = first.input.clone()
    out = torch.empty_like(x)

    def step():
        kernel.op.out(*first._replace(input=x), out=out)
        return kernel.op(x, *first[1:]), kernel.op.scalar(x, 1.5, 0.5)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # torch asks for a warm-up off the default stream
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, z = step()
    for sample in (second, first, second):
        x.copy_(sample.input)
        for t in (y, z, out):
            t.fill_(float("nan"))
        graph.replay()
        expected = kernel.op(sample.input, *first[1:])
        assert same_bits(y, expected)
        assert same_bits(out, expected)
        assert same_bits(z, kernel.op.scalar(sample.input, 1.5, 0.5))


def test_case_48_input_on_a_gpu_that_is_not_the_current_one(kernel, second_cuda):
    assert torch.cuda.current_device() == 0
    x = torch.tensor([1.5, 0.0, 0.0, 0.0], dtype=kernel.dtype, device=second_cuda)
    y = kernel.op(x)
    assert_matches_float64(kernel, y, x)
    assert y.float().cpu().tolist() == pytest.approx([1.732, -0.577, -0.577, -0.577], abs=2e-3)
    sample = sample_inputs(kernel, second_cuda, (33, 64))
    expected = kernel.op(*(t.to("cuda:0") for t in sample[:3]))
    out = torch.empty_like(sample.input)
    kernel.op.out(*sample, out=out)
    assert torch.equal(out.cpu(), expected.cpu())
    assert torch.equal(kernel.op(*sample._replace(input=sample.input.t().contiguous().t())).cpu(), expected.cpu())
    assert torch.cuda.current_device() == 0


def test_side_stream_of_a_gpu_that_is_not_the_current_one(kernel, second_cuda):
    sample = sample_inputs(kernel, second_cuda, (5, 1025))
    expected = kernel.op(*sample)
    side = torch.cuda.Stream(second_cuda)
    x = torch.full_like(sample.input, float("nan"))
    torch.cuda.synchronize(second_cuda)
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP_CYCLES)
        x.copy_(sample.input)
        with torch.cuda.device(0):
            y = kernel.op(x, *sample[1:])
    side.synchronize()
    assert same_bits(y, expected)


def test_a_launch_does_not_wait_for_the_gpu(kernel, cuda):
    sample = sample_inputs(kernel, cuda, (5, 1025))
    kernel.op(*sample)
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    asleep = torch.cuda.Event()
    asleep.record()
    kernel.op(*sample)
    assert not asleep.query(), "the op returned only after earlier work of the stream had finished"
    torch.cuda.synchronize()


def free_or_skip(gigabytes):
    torch.cuda.empty_cache()  # what an earlier test left in torch's cache counts as taken
    if torch.cuda.mem_get_info()[0] < gigabytes * 1e9:
        pytest.skip(f"needs {gigabytes} GB of free GPU memory")


@pytest.mark.large
@pytest.mark.parametrize(
    ("rows", "cols"),
    [
        pytest.param(131072, 16384, id="exactly_2_to_31"),
        pytest.param(175000, 12288, id="just_past_2_to_31"),
        pytest.param(4194320, 1024, id="past_2_to_32"),
    ],
)
def test_cases_15_and_16_rows_past_32_bit_offsets(kernel, rows, cols, cuda):
    size = rows * cols * torch.finfo(kernel.dtype).bits // 8
    free_or_skip(2.1 * size / 1e9)
    x = torch.zeros(rows, cols, dtype=kernel.dtype, device=cuda)
    tail, weight, bias, _ = sample_inputs(kernel, cuda, (16, cols))
    places = [0, rows // 2, rows - 16]
    for place in places:
        x[place : place + 16] = tail
    y = kernel.op(x, weight, bias)
    for place in places:
        assert_matches_float64(kernel, y[place : place + 16], tail, weight, bias)
    assert torch.equal(y[rows - 17], bias)
    del y
    kernel.op.out(x, weight, bias, out=x)
    assert_matches_float64(kernel, x[rows - 16 :], *Sample(tail, weight, bias))


@pytest.mark.large
def test_rows_of_a_view_further_apart_than_32_bit_offsets(kernel, cuda):
    stride = 2**31 + 8
    free_or_skip(2.3 * stride * torch.finfo(kernel.dtype).bits / 8 / 1e9)
    sample = sample_inputs(kernel, cuda, (2, 1025))
    storage = torch.full((stride + 1025,), float("nan"), dtype=kernel.dtype, device=cuda)
    x = storage.as_strided((2, 1025), (stride, 1))
    x.copy_(sample.input)
    assert same_bits(kernel.op(x, *sample[1:]), kernel.op(*sample))
