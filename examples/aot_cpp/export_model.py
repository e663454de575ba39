"""Compiles a small model ahead of time into a package: python export_model.py model.pt2 [cpu | cuda]

Prints what ./run should print for 3 rows of 16 columns.
"""

import sys

import torch
from torch import nn

import fastln


def main(package: str, device: str = "cpu") -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 8)).to(device).eval()
    fastln.convert(model)
    rows = {0: torch.export.Dim("rows", min=1, max=65536)}
    with torch.no_grad():
        program = torch.export.export(model, (torch.ones(2, 16, device=device),), dynamic_shapes=(rows,))
        torch._inductor.aoti_compile_and_package(program, package_path=package)
        print(model(torch.ones(3, 16, device=device)).abs().sum().item())


if __name__ == "__main__":
    main(*sys.argv[1:])
