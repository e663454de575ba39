"""The `.out` overload and memory it shares: what is refused, what is allowed, what autograd is told."""

import pytest
import torch
from reference import bits, call_out, same_bits, sample_inputs
from torch._subclasses.fake_tensor import FakeTensorMode

COLS = 6


def later_elements(buffer):
    """`out` starts one element into the input."""
    return buffer[: 5 * COLS].view(5, COLS), buffer[1 : 5 * COLS + 1].view(5, COLS)


def earlier_rows(buffer):
    """`out` starts a row before the input."""
    rows = buffer[: 6 * COLS].view(6, COLS)
    return rows[1:], rows[:-1]


def its_transpose(buffer):
    """The same memory from the same address on, in another order."""
    out = buffer[: COLS * COLS].view(COLS, COLS)
    return out.t(), out


def a_row_repeated(buffer):
    """The input is one row many times over, `out` begins with it."""
    out = buffer[: 5 * COLS].view(5, COLS)
    return out[:1].expand(5, COLS), out


def every_other_row(buffer):
    """Input rows twice as far apart as those of `out`, from the same address on."""
    return buffer[: 10 * COLS].view(10, COLS)[::2], buffer[: 5 * COLS].view(5, COLS)


PARTIAL_OVERLAPS = [later_elements, earlier_rows, its_transpose, a_row_repeated, every_other_row]


def buffer_of(kernel, device):
    torch.manual_seed(0)
    return torch.randn(128).to(kernel.dtype).to(device)


def overlap_refusal(kernel, what):
    return f"{kernel.qualname}: expected out .*overlap.*{what}|{kernel.qualname}: expected out .*{what}.*overlap"


@pytest.mark.parametrize("overlap", PARTIAL_OVERLAPS, ids=lambda f: f.__name__)
def test_an_out_that_partly_overlaps_the_input_is_refused(kernel, overlap, device):
    buffer = buffer_of(kernel, device)
    before = buffer.clone()
    x, out = overlap(buffer)
    with pytest.raises(RuntimeError, match=overlap_refusal(kernel, "input")):
        kernel.op.out(x, out=out)
    assert torch.equal(buffer, before)


@pytest.mark.parametrize("overlap", PARTIAL_OVERLAPS, ids=lambda f: f.__name__)
def test_fakes_refuse_a_partial_overlap_too(kernel, overlap):
    with FakeTensorMode(), pytest.raises(RuntimeError, match=overlap_refusal(kernel, "input")):
        x, out = overlap(torch.empty(128, dtype=kernel.dtype))
        kernel.op.out(x, out=out)


@pytest.mark.parametrize("overlap", PARTIAL_OVERLAPS, ids=lambda f: f.__name__)
def test_compiled_code_refuses_a_partial_overlap_too(kernel, overlap, fresh_compiler):
    buffer = buffer_of(kernel, "cpu")
    before = buffer.clone()
    x, out = overlap(buffer)
    compiled = torch.compile(lambda x, out: kernel.op.out(x, out=out), fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match=overlap_refusal(kernel, "input")):
        compiled(x, out)
    assert torch.equal(buffer, before)


@pytest.mark.parametrize("parameter", ["weight", "bias"])
@pytest.mark.parametrize("shift", [0, 3, -3])
def test_an_out_in_the_memory_of_weight_or_bias_is_refused(kernel, parameter, shift, device):
    """Rows are written while other rows still read weight and bias."""
    buffer = buffer_of(kernel, device)
    before = buffer.clone()
    x = sample_inputs(kernel, device, (2, COLS)).input
    out = buffer[3 + shift : 3 + shift + 2 * COLS].view(2, COLS)
    with pytest.raises(RuntimeError, match=overlap_refusal(kernel, parameter)):
        kernel.op.out(x, **{parameter: buffer[3 : 3 + COLS]}, out=out)
    assert torch.equal(buffer, before)


def test_an_out_next_to_input_weight_and_bias_in_one_storage_is_allowed(kernel, device):
    buffer = buffer_of(kernel, device)
    bias, x, out, weight = (
        buffer[i:j].view(shape) for i, j, shape in ((0, 6, (6,)), (6, 18, (2, 6)), (18, 30, (2, 6)), (30, 36, (6,)))
    )
    expected = kernel.op(x.clone(), weight.clone(), bias.clone())
    before = buffer.clone()
    kernel.op.out(x, weight, bias, out=out)
    before[18:30] = expected.flatten()
    assert same_bits(buffer, before)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(buffer)
        kernel.op.out(fake[6:18].view(2, 6), fake[30:36], fake[0:6], out=fake[18:30].view(2, 6))


def test_an_empty_out_overlaps_nothing(kernel, device):
    buffer = buffer_of(kernel, device)
    x, out = buffer[3:3].view(0, COLS), buffer[3:3].view(0, COLS)
    kernel.op.out(x, buffer[:COLS], out=out)
    kernel.op.out(buffer[5:5].view(3, 0), out=buffer[8:8].view(3, 0))


def test_in_place_through_another_view_of_the_same_rows(kernel, device):
    sample = sample_inputs(kernel, device, (2, 3, 33))
    expected = kernel.op(*sample)
    out = sample.input.view(-1).view(2, 3, 33)
    assert same_bits(call_out(kernel, sample, out), expected)
    assert same_bits(sample.input, expected)


def test_in_place_under_fake_tensors_is_allowed(kernel):
    with FakeTensorMode():
        x = torch.empty(3, COLS, dtype=kernel.dtype)
        assert kernel.op.out(x, out=x) is None


def test_out_is_an_accepted_view_into_a_larger_tensor(kernel, device):
    sample = sample_inputs(kernel, device, (2, 33))
    larger = torch.full((4, 33), 7.0, dtype=kernel.dtype, device=device)
    call_out(kernel, sample, larger[1:3])
    assert same_bits(larger[1:3], kernel.op(*sample))
    assert (bits(larger[0]) == bits(larger[3])).all() and (larger[0] == 7.0).all()


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_out_counts_as_modified(kernel, mode, device):
    sample = sample_inputs(kernel, device, (3, COLS))
    for out in (torch.empty_like(sample.input), torch.empty(0, COLS, dtype=kernel.dtype, device=device)):
        version = out._version
        with mode():
            kernel.op.out(sample.input[: len(out)], *sample[1:], out=out)
        assert out._version == version + 1


def test_backward_through_a_value_that_out_replaced_raises(kernel, device):
    """exp saves its result for its backward; writing into it must not give the gradient of the new values."""
    leaf = torch.rand(3, COLS, device=device).to(kernel.dtype).requires_grad_()
    saved = leaf.exp()
    kernel.op.out(sample_inputs(kernel, device, (3, COLS)).input, out=saved.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


# ---------------------------------------------------------------------------------- torch's negative bit


def negative(tensor):
    """The same values, as minus something else: torch's negative bit over the memory of -tensor."""
    return torch._neg_view(-tensor)


@pytest.mark.parametrize("others_are_negative", [False, True])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_negative_out_is_written_what_it_then_stands_for(kernel, mode, others_are_negative, device):
    sample = sample_inputs(kernel, device, (3, 33))
    expected = kernel.op(*sample)
    with mode():
        memory = torch.full_like(sample.input, 7.0)
        given = [negative(t) if others_are_negative and isinstance(t, torch.Tensor) else t for t in sample]
        out = torch._neg_view(memory)
        assert kernel.op.out(*given, out=out) is None
    assert out.is_neg()
    assert torch.equal(out, expected)
    assert torch.equal(memory, -expected)


def test_an_out_beside_negative_arguments_is_written_and_counts_as_modified_once(kernel, device):
    sample = sample_inputs(kernel, device, (3, 33))
    out = torch.empty_like(sample.input)
    version = out._version
    kernel.op.out(negative(sample.input), *sample[1:], out=out)
    assert same_bits(out, kernel.op(*sample))
    assert out._version == version + 1


def test_a_negative_out_counts_as_modified_once_and_may_be_the_input(kernel, device):
    sample = sample_inputs(kernel, device, (3, 33))
    out = negative(sample.input)
    version = out._version
    kernel.op.out(out, *sample[1:], out=out)
    assert torch.equal(out, kernel.op(*sample))
    assert out._version == version + 1


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_negative_out_is_refused_like_any_other(kernel, mode, device):
    buffer = buffer_of(kernel, device)
    before = buffer.clone()
    with mode():
        x, out = later_elements(buffer)
        with pytest.raises(RuntimeError, match=overlap_refusal(kernel, "input")):
            kernel.op.out(x, out=torch._neg_view(out))
        with pytest.raises(RuntimeError, match=f"{kernel.qualname}: expected a contiguous out"):
            kernel.op.out(x.clone(), out=torch._neg_view(out.clone().t().contiguous().t()))
    assert torch.equal(buffer, before)


def test_fakes_and_compiled_code_take_a_negative_out(kernel, fresh_compiler):
    with FakeTensorMode():
        x = torch.empty(3, COLS, dtype=kernel.dtype)
        assert kernel.op.out(torch._neg_view(x), out=torch._neg_view(torch.empty_like(x))) is None
    sample = sample_inputs(kernel, "cpu", (3, COLS))
    out = torch._neg_view(torch.zeros_like(sample.input))
    compiled = torch.compile(lambda x, out: kernel.op.out(x, out=out), fullgraph=True, backend="aot_eager")
    compiled(sample.input, out)
    assert torch.equal(out, kernel.op(sample.input))
