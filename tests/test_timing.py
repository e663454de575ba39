"""Host times: what is timed is what is said to be."""

import torch

import fastln
from fastln import _timing


def test_host_time_of_a_step_is_that_of_a_forward_and_a_backward():
    x, weight = (torch.ones(4, 8, requires_grad=True), torch.ones(8, requires_grad=True))
    calls = []

    def call(*arguments):
        y = fastln.layer_norm(*arguments)
        if y.requires_grad:
            y.register_hook(lambda grad: calls.append((x.grad, weight.grad)))
        return y

    with torch.no_grad():
        seconds = _timing.host_time_of_step(call, (x, [8], weight), batches=2, calls=3)
    assert 0 < seconds < 1
    assert calls == [(None, None)] * 9  # a batch more warms up; no step finds the gradients of the one before
    assert x.grad is not None
    assert weight.grad is not None
