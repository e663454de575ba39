"""What test_distributed.py runs in two processes at once:

    python two_ranks.py DEVICE RANK RENDEZVOUS RESULTS

DEVICE is cpu (gloo) or cuda (NCCL, one GPU a rank), RENDEZVOUS a file that both make the group by, RESULTS a JSON
file to write: the traceback of each check by name, or null where it passed.
"""

import copy
import datetime
import json
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import fastln

WORLD = 2
CHECKS = {}


def check(function):
    """Adds the function to what is run."""
    CHECKS[function.__name__] = function
    return function


def values(*shape, seed=0, dtype=torch.float32):
    """The same on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(a, b, relative=1e-5):
    torch.testing.assert_close(a, b, rtol=relative, atol=relative * max(1.0, b.abs().max().item() if b.numel() else 0))


class Here:
    """This rank's device and mesh."""

    def __init__(self, kind, rank):
        from torch.distributed.device_mesh import init_device_mesh

        self.rank = rank
        self.device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
        self.mesh = init_device_mesh(kind, (WORLD,))

    def values(self, *shape, **options):
        return values(*shape, **options).to(self.device)

    def distribute(self, tensor, placement):
        from torch.distributed.tensor import Partial, distribute_tensor

        if isinstance(placement, Partial):
            from torch.distributed.tensor import DTensor

            return DTensor.from_local(tensor / WORLD, self.mesh, [placement])
        return distribute_tensor(tensor, self.mesh, [placement])


def placements():
    """Name, placement, and whether the rows stay where they are, for an input [4, 6, 32]."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    return [(Replicate(), True), (Shard(0), True), (Shard(1), True), (Shard(2), False), (Partial(), False)]


# -------------------------------------------------------------------------------------------- the ops


@check
def layer_norm_without_grad(here):

    x, w, b = here.values(4, 6, 32), here.values(32, seed=1), here.values(32, seed=2)
    expected = fastln.layer_norm(x, [32], w, b)
    from torch.distributed.tensor import Replicate

    for call in (fastln.layer_norm, torch.ops.fastln.layer_norm):
        for placement, stays in placements():
            for dtype in (torch.float32, torch.float64):
                with torch.no_grad():
                    y = call(
                        here.distribute(x.to(dtype), placement),
                        [32],
                        here.distribute(w, Replicate()),
                        here.distribute(b, Replicate()),
                    )
                assert not stays or y.placements == (placement,), (placement, y.placements)
                close(y.full_tensor().float(), expected)


@check
def layer_norm_with_grad(here):
    from torch.distributed.tensor import Replicate

    def gradients(norm, x, w, b):
        leaves = [t.detach().requires_grad_() for t in (x, w, b) if t is not None]
        y = norm(leaves[0], [32], *([None] * (w is None)), *leaves[1:])
        y.backward(torch.ones_like(y) * y.detach())
        return [y.detach(), *(t.grad for t in leaves)]

    x, w, b = here.values(4, 6, 32), here.values(32, seed=1), here.values(32, seed=2)
    for call in (fastln.layer_norm, torch.ops.fastln.layer_norm):
        for weight, bias in ((w, b), (w, None), (None, b), (None, None)):
            expected = gradients(F.layer_norm, x, weight, bias)
            for placement, _ in placements():
                parameters = [None if t is None else here.distribute(t, Replicate()) for t in (weight, bias)]
                got = gradients(call, here.distribute(x, placement), *parameters)
                for a, e in zip(got, expected, strict=True):
                    close(a.full_tensor(), e)


@check
def layer_norm_fwd_and_bwd(here):
    from torch.distributed.tensor import Partial, Replicate

    ops = torch.ops.fastln
    x, w, b, dy = here.values(4, 6, 32), here.values(32, seed=1), here.values(32, seed=2), here.values(4, 6, 32, seed=3)
    whole = ops.layer_norm_fwd(x, [32], w, b, 1e-5)
    for placement, stays in placements():
        xs, dys = here.distribute(x, placement), here.distribute(dy, placement)
        ws, bs = here.distribute(w, Replicate()), here.distribute(b, Replicate())
        sharded = ops.layer_norm_fwd(xs, [32], ws, bs, 1e-5)
        for a, e in zip(sharded, whole, strict=True):
            assert not stays or a.placements == (placement,)
            close(a.full_tensor(), e)
        for mask in ([True, True, True], [True, False, False], [False, True, True], [False, False, True]):
            expected = ops.layer_norm_bwd(dy, x, [32], *whole[1:], w, b, mask)
            got = ops.layer_norm_bwd(dys, xs, [32], *sharded[1:], ws, bs, mask)
            for a, e, wanted in zip(got, expected, mask, strict=True):
                assert (a is not None) == (e is not None) == wanted
                if wanted:
                    close(a.full_tensor(), e)
            if stays and mask[1] and not placement.is_replicate():
                assert got[1].placements == got[2].placements == (Partial(),)


@check
def the_named_ops(here):
    from torch.distributed.tensor import Replicate

    for kernel in fastln.KERNELS:
        x, w = here.values(4, 6, 32, dtype=kernel.dtype), here.values(32, seed=1, dtype=kernel.dtype)
        for placement, stays in placements()[:4]:
            y = kernel.op(here.distribute(x, placement), here.distribute(w, Replicate()))
            assert not stays or y.placements == (placement,)
            assert torch.equal(y.full_tensor(), kernel.op(x, w))
            scaled = kernel.op(here.distribute(x, placement), 2.0, 1.0)
            assert torch.equal(scaled.full_tensor(), kernel.op(x, 2.0, 1.0))


@check
def one_sharding_of_the_input_and_several_normalized_shapes(here):
    """What DTensor remembers for one must not be used for the other."""
    from torch.distributed.tensor import Shard

    x = here.values(4, 8, 8)
    for shape in ([8], [8, 8], [8], [4, 8, 8]):
        for grad in (False, True):
            xs = here.distribute(x, Shard(1)).requires_grad_(grad)
            close(fastln.layer_norm(xs, shape).full_tensor(), F.layer_norm(x, shape))
            close(
                torch.ops.fastln.layer_norm_fwd(xs.detach(), shape, None, None, 1e-5)[0].full_tensor(),
                F.layer_norm(x, shape),
            )


@check
def shards_of_different_size_and_empty_ones(here):
    from torch.distributed.tensor import Replicate, Shard

    for rows in (5, 1):
        x, w = here.values(rows, 32), here.values(32, seed=1)
        leaf, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
        F.layer_norm(leaf, [32], weight).pow(2).sum().backward()
        xs, ws = here.distribute(x, Shard(0)).requires_grad_(), here.distribute(w, Replicate()).requires_grad_()
        y = fastln.layer_norm(xs, [32], ws)
        y.pow(2).sum().backward()
        assert y.placements == xs.grad.placements == (Shard(0),)
        close(y.full_tensor(), F.layer_norm(x, [32], w))
        close(xs.grad.full_tensor(), leaf.grad)
        close(ws.grad.full_tensor(), weight.grad)


@check
def local_shapes_are_those_of_f_layer_norm(here):
    from torch.distributed.tensor import Replicate

    w = here.distribute(here.values(32, seed=1), Replicate())
    for rows in (4, 3, 1):
        x = here.values(rows, 6, 32)
        for placement, _ in placements():
            for grad in (False, True):
                xs = here.distribute(x, placement).requires_grad_(grad)
                y, expected = (norm(xs, [32], w) for norm in (fastln.layer_norm, F.layer_norm))
                assert (y.placements, y.to_local().shape) == (expected.placements, expected.to_local().shape)
                close(y.to_local().detach(), expected.to_local().detach())


@check
def plain_and_distributed_tensors_together_are_refused_as_torch_refuses_them(here):
    from torch.distributed.tensor import Shard

    xs, w = here.distribute(here.values(4, 32), Shard(0)), here.values(32)
    with torch.no_grad():
        for norm in (F.layer_norm, fastln.layer_norm):
            try:
                norm(xs, [32], w)
            except RuntimeError as error:
                assert "mixed torch.Tensor and DTensor" in str(error)
            else:
                raise AssertionError("not refused")


@check
def compiled_with_shards(here):
    from torch.distributed.tensor import Replicate, Shard

    x, w = here.values(4, 6, 32), here.values(32, seed=1)
    compiled = torch.compile(
        lambda t, weight: fastln.layer_norm(t, [32], weight) * 2, backend="aot_eager", fullgraph=True
    )
    y = compiled(here.distribute(x, Shard(1)), here.distribute(w, Replicate()))
    assert y.placements == (Shard(1),)
    close(y.full_tensor(), 2 * F.layer_norm(x, [32], w))


# --------------------------------------------------------------------------------------------- models


class Block(nn.Module):
    """A pre-norm feed-forward block."""

    def __init__(self, width=32):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Two blocks and a norm, with the same random parameters on every rank."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(32)
        for i, parameter in enumerate(self.parameters()):
            parameter.data = values(*parameter.shape, seed=i) / 4

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def whole_step(here, x):
    """Output and gradients of the stock model on one device."""
    model = Model().to(here.device)
    y = model(x)
    y.pow(2).mean().backward()
    return y.detach(), {name: p.grad for name, p in model.named_parameters()}


def full(t):
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def compare(model, expected, relative=1e-4):
    for name, parameter in model.named_parameters():
        close(full(parameter.grad), expected[name.removeprefix("module.")], relative)


@check
def ddp(here):

    x = here.values(8, 6, 32)
    _, expected = whole_step(here, x)
    model = Model().to(here.device)
    assert fastln.convert(model).count == 3
    model = nn.parallel.DistributedDataParallel(model, device_ids=[here.rank] if here.device.type == "cuda" else None)
    model(x.chunk(WORLD)[here.rank]).pow(2).mean().backward()
    compare(model, expected)


@check
def fsdp2(here):
    from torch.distributed.fsdp import fully_shard

    x = here.values(8, 6, 32)
    _, expected = whole_step(here, x)
    for before in (True, False):
        model = Model().to(here.device)
        if before:
            assert fastln.convert(model).count == 3
        for block in model.blocks:
            fully_shard(block, mesh=here.mesh)
        fully_shard(model.norm, mesh=here.mesh)
        fully_shard(model, mesh=here.mesh)
        if not before:
            assert fastln.convert(model).count == 3
        assert all(isinstance(m, fastln.LayerNorm) for m in model.modules() if isinstance(m, nn.LayerNorm))
        model(x.chunk(WORLD)[here.rank]).pow(2).mean().backward()
        compare(model, expected)


@check
def sequence_parallel(here):
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    x = here.values(4, 8, 32)
    y, expected = whole_step(here, x)
    for before in (True, False):
        model = Model().to(here.device)
        if before:
            assert fastln.convert(model).count == 3
        plan = {"norm": SequenceParallel()}
        for i in range(len(model.blocks)):
            plan |= {
                f"blocks.{i}.norm": SequenceParallel(),
                f"blocks.{i}.up": ColwiseParallel(input_layouts=Shard(1)),
                f"blocks.{i}.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
            }
        parallelize_module(model, here.mesh, plan)
        parallelize_module(
            model,
            here.mesh,
            PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=False),
        )
        parallelize_module(
            model, here.mesh, PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
        )
        if not before:
            assert fastln.convert(model).count == 3
        got = model(x)
        close(full(got.detach()), y, 1e-4)
        got.pow(2).mean().backward()
        compare(model, expected)


@check
def a_copy_of_a_sharded_module_state(here):
    """A state dict of the one loads into the other, sharded or not."""
    from torch.distributed.tensor import Replicate

    stock, ours = nn.LayerNorm(32).to(here.device), fastln.LayerNorm(32).to(here.device)
    stock.weight.data = here.values(32)
    from torch.distributed.tensor import distribute_module

    distribute_module(ours, here.mesh)
    state = {name: here.distribute(t, Replicate()) for name, t in copy.deepcopy(stock.state_dict()).items()}
    ours.load_state_dict(state)
    close(ours.weight.full_tensor(), stock.weight)


def main(kind, rank, rendezvous, results):
    rank = int(rank)
    if kind == "cuda":
        torch.cuda.set_device(rank)
    timeout = datetime.timedelta(seconds=60)
    backend = {"cpu": "gloo", "cuda": "nccl"}[kind]
    dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD, timeout=timeout)
    here, outcome = Here(kind, rank), {}
    for name, function in CHECKS.items():
        try:
            function(here)
            outcome[name] = None
        except Exception:
            outcome[name] = traceback.format_exc()
    Path(results).write_text(json.dumps(outcome))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
