"""The examples of docs/usage.md run, section by section."""

import re
import socket

import pytest
import torch
from fresh import ROOT, process
from needs import require_loadable_packages

DOC = ROOT / "docs" / "usage.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def sections():
    """The code of each section by its heading. The imports of the first serve all."""
    parts = re.split(r"^## (.*)$", DOC.read_text(), flags=re.MULTILINE)[1:]
    return {title: BLOCK.findall(text) for title, text in zip(parts[::2], parts[1::2], strict=True)}


SECTIONS = sections()
IMPORTS = SECTIONS["One call, one module"][0].partition("\n\nx = ")[0]


def test_all_the_code_of_the_document_is_run():
    assert sum(map(len, SECTIONS.values())) == DOC.read_text().count("```") / 2 == len(BLOCK.findall(DOC.read_text()))
    assert IMPORTS.endswith("import fastln")


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


@pytest.mark.slow
@pytest.mark.parametrize("title", [title for title, blocks in SECTIONS.items() if blocks])
def test_the_examples_run(title, device, tmp_path, inductor):
    if "override" in title and torch.version.cuda is None:
        pytest.skip("a torch without CUDA")
    given = f"device, folder, world_size = {device.type!r}, {str(tmp_path)!r}, 1"
    around = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    if device.type == "cpu":
        around["CUDA_VISIBLE_DEVICES"] = ""  # torch.distributed would take the GPUs' backend
    elif "AOTInductor" in title:
        require_loadable_packages(device)
    done = process(given, IMPORTS, *SECTIONS[title], **around)
    assert done.returncode == 0, done.stderr
