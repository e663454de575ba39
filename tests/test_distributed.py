"""DTensor, DDP, FSDP2 and tensor-parallel plans, on two ranks; and DTensor's rules, on a group of four that is none."""

import json
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import two_ranks
from fresh import process, python

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="a torch without torch.distributed")


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """The traceback of each check by rank and name, by device; the ranks run once a device."""
    known = {}

    def of(kind):
        if kind not in known:
            known[kind] = run_ranks(kind, tmp_path_factory.mktemp(kind))
        return known[kind]

    return of


def run_ranks(kind, folder):
    results = [folder / f"{rank}.json" for rank in range(two_ranks.WORLD)]
    ranks = [
        subprocess.Popen(
            [sys.executable, two_ranks.__file__, kind, str(rank), str(folder / "rendezvous"), str(results[rank])],
            cwd="/",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(two_ranks.WORLD)
    ]
    try:
        said = [rank.communicate(timeout=500)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for result, text in zip(results, said, strict=True):
        assert result.exists(), text
    return [json.loads(result.read_text()) for result in results]


@pytest.mark.slow
@pytest.mark.parametrize("name", two_ranks.CHECKS)
def test_on_two_ranks(name, outcome, device):
    """What each check does stands in two_ranks.py."""
    if device.type == "cuda" and torch.cuda.device_count() < two_ranks.WORLD:
        pytest.skip("needs two CUDA devices")
    for rank, checks in enumerate(outcome(device.type)):
        assert checks[name] is None, f"rank {rank}: {checks[name]}"


FOUR = """
    import torch, torch.distributed as dist, fastln
    from torch.testing._internal.distributed.fake_pg import FakeStore
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
    mesh = init_device_mesh("cpu", (2, 2))
    x, w = torch.randn(4, 6, 32), torch.randn(32)
"""


@pytest.mark.slow
def test_on_a_mesh_of_two_dimensions_each_shards_rows_of_its_own():
    python(
        FOUR,
        """
        for placements in ([Shard(0), Shard(1)], [Shard(1), Replicate()], [Shard(0), Shard(0)]):
            xs = distribute_tensor(x, mesh, placements).requires_grad_()
            ws = distribute_tensor(w, mesh, [Replicate()] * 2).requires_grad_()
            y = torch.ops.fastln.layer_norm(xs, [32], ws)
            assert list(y.placements) == placements, y.placements
            y.sum().backward()
            assert list(xs.grad.placements) == placements, xs.grad.placements
            sums = [Partial() if p.is_shard() else Replicate() for p in placements]
            assert list(ws.grad.placements) == sums, ws.grad.placements
            with torch.no_grad():
                _, mean, rstd = torch.ops.fastln.layer_norm_fwd(xs, [32], ws, None, 1e-5)
            assert list(mean.placements) == list(rstd.placements) == placements
        xs = distribute_tensor(x, mesh, [Shard(0), Shard(2)])
        assert list(fastln.layer_norm(xs, [32]).placements) == [Shard(0), Replicate()]
        """,
    )


@pytest.mark.slow
def test_local_shapes_are_those_of_f_layer_norm_for_every_placement():
    """Whatever F.layer_norm does with a partial sum or an uneven shard, a converted model must do too."""
    python(
        FOUR,
        """
        import itertools
        import torch.nn.functional as F
        from torch.distributed.tensor import DTensor

        def make(shape, mesh, placements):
            local = list(shape)
            for dim, placement in enumerate(placements):
                if placement.is_shard():
                    local[placement.dim] = -(-local[placement.dim] // mesh.size(dim))  # the first rank has the largest
            return DTensor.from_local(
                torch.randn(local), mesh, placements, run_check=False,
                shape=torch.Size(shape), stride=torch.empty(shape).stride(),
            )

        def outcome(norm, x, row, parameters):
            y = norm(x, row, *parameters)
            return y.placements, y.to_local().shape

        few = [Replicate(), Shard(0), Shard(1), Shard(2), Partial()]
        meshes, shapes = (init_device_mesh("cpu", (4,)), mesh), ([4, 8, 16], [3, 5, 16], [1, 8, 8])
        for mesh, shape in itertools.product(meshes, shapes):
            for placements in itertools.product(few, repeat=mesh.ndim):
                for row in (shape[2:], shape[1:]):
                    whole = [distribute_tensor(torch.randn(row), mesh, [Replicate()] * mesh.ndim) for _ in range(2)]
                    for parameters in ([], whole):
                        x = make(shape, mesh, placements)
                        expected = outcome(F.layer_norm, x, row, parameters)
                        for norm in (fastln.layer_norm, torch.ops.fastln.layer_norm):
                            for grad in (False, True):
                                got = outcome(norm, x.detach().requires_grad_(grad), row, parameters)
                                assert got == expected, (placements, shape, row, got, expected)
                x.requires_grad_()
                y = fastln.layer_norm(x, row, *whole)
                y.backward(torch.ones_like(y))
                assert x.grad.placements == y.placements, (placements, x.grad.placements, y.placements)
        """,
    )


@pytest.mark.slow
def test_the_named_ops_do_not_shard_anew():
    python(
        FOUR,
        """
        from torch.distributed.tensor import DTensor
        xs = DTensor.from_local(x, mesh, [Partial(), Partial()])
        ws = distribute_tensor(w, mesh, [Replicate()] * 2)
        for arguments in ((ws, None), (2.0, 1.0)):
            y = torch.ops.fastln.layer_norm_f32(xs, *arguments)
            assert y.placements == (Replicate(), Replicate()), y.placements
            assert y.to_local().shape == x.shape
        """,
    )


# ------------------------------------------------------------------------------------------ the import


def test_importing_fastln_does_not_import_dtensor():
    python("import sys, fastln; assert 'torch.distributed.tensor' not in sys.modules")


@pytest.mark.slow
@pytest.mark.parametrize(
    "imports",
    [
        "import fastln, torch.distributed.tensor",
        "import torch.distributed.tensor, fastln",
        "import fastln; from torch.distributed.tensor.parallel import SequenceParallel",
        "import fastln; fastln.distributed.register(); fastln.distributed.register()",
        "import fastln, importlib; importlib.import_module('torch.distributed.tensor')",
    ],
)
def test_the_rules_are_there_in_whatever_order_both_are_imported(imports):
    python(
        imports,
        """
        import sys, torch
        from torch.distributed.tensor import DTensor
        known = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
        assert torch.ops.fastln.layer_norm.default in known
        assert all(k.op.default in known and k.op.scalar in known for k in fastln.KERNELS)
        assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("fastln")]
        """,
    )


@pytest.mark.slow
def test_a_torch_that_takes_no_rules_still_imports_dtensor_and_says_so():
    done = process(
        """
        import fastln
        fastln.distributed.KERNELS = None  # whatever it is that fails
        import torch.distributed.tensor
        print(fastln.distributed._registered)
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "False\n"
    assert "UserWarning: fastln.distributed: no sharding rules under torch" in done.stderr
