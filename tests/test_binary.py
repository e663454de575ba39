"""Static checks of the installed shared library. None needs a GPU.

NVIDIA's cuobjdump reads the machine code; it is a development requirement, as pyelftools is.
"""

import functools
import importlib.metadata
import importlib.util
import itertools
import os
import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest
from needs import missing

import fastln
from fastln._library import library

LIBRARY = Path(fastln.__file__).with_name("libfastln.so")
ARCHS = fastln.build_info()["archs"]
PTX = fastln.build_info()["ptx"]
CUDA_TYPE = {"float16": "__half", "float32": "float"}


def sm(arch):
    """'9.0' -> 'sm_90'"""
    return f"sm_{arch.replace('.', '')}"


def cuobjdump(*arguments):
    """What cuobjdump prints of the library, with C++ names readable."""
    spec = importlib.util.find_spec("nvidia")
    folders = [f"{root}/cu13/bin" for root in (spec and spec.submodule_search_locations) or ()]
    path = os.pathsep.join([*folders, os.environ["PATH"]])  # cuobjdump looks for nvdisasm on PATH
    tool = shutil.which("cuobjdump", path=path)
    if tool is None:
        missing("cuobjdump (nvidia-cuda-cuobjdump, from requirements-dev.txt)")
    raw = subprocess.run(
        [tool, *arguments, LIBRARY], env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True
    )
    return subprocess.run(["c++filt"], input=raw.stdout, capture_output=True, text=True, check=True).stdout


def is_of(kernel, function):
    """Whether a function is an instantiation of a kernel: for rows of either length, a thread holds once or twice as
    much as it moves in a step."""
    types = f"{CUDA_TYPE[kernel.element]}, {CUDA_TYPE[kernel.accumulate]}"
    held = (kernel.items, 2 * kernel.items)
    return any(f"fastln::layer_norm_rows<{types}, {n}, {kernel.access}, {kernel.access}, " in function for n in held)


@functools.cache
def resource_usage():
    """{arch: {function: {"REG": …, "STACK": …, "LOCAL": …}}}"""
    usage = defaultdict(dict)
    arch = function = None
    for line in cuobjdump("--dump-resource-usage").splitlines():
        if match := re.match(r"arch = (sm_\w+)", line):
            arch = match[1]
        elif match := re.match(r"\s*Function (.*):$", line):
            function = match[1]
        elif " STACK:" in line:
            usage[arch][function] = {key: int(value) for key, value in re.findall(r"\b([A-Z]+):(\d+)", line)}
    return usage


@functools.cache
def instructions(arch):
    """{function: its memory instructions in the arch's machine code, such as "LDG.E.EF.128", and ACQBULK, which is
    griddepcontrol.wait, in order}"""
    found = defaultdict(list)
    function = None
    for line in cuobjdump("-sass", "-arch", sm(arch)).splitlines():
        if match := re.search(r"Function : (.*)", line):
            function = match[1]
        elif match := re.search(r"\b((?:ACQBULK|UBLKCP|LDG|STG|LDL|STL)[.A-Z0-9a-z_]*)", line):
            found[function].append(match[1])
    return found


def memory_instructions():
    """Those on the first arch; all archs share the source."""
    return instructions(ARCHS[0])


def widths(kernel, operation):
    """For each instantiation of a kernel, the sizes in bits of its global loads ("LDG") or stores ("STG")."""
    found = {
        function: {
            (re.search(r"\.(?:[US]?)(8|16|64|128)\b", text) or [0, "32"])[1] for text in texts if operation in text
        }
        for function, texts in memory_instructions().items()
        if is_of(kernel, function)
    }
    assert found, f"no function in the machine code is one of {kernel.name}"
    return found


def elf():
    try:
        from elftools.elf.elffile import ELFFile
    except ImportError:
        missing("pyelftools")
    return ELFFile(LIBRARY.open("rb"))


def dynamic_entries(tag):
    return [entry for entry in elf().get_section_by_name(".dynamic").iter_tags() if entry.entry.d_tag == tag]


def undefined_symbols():
    """{name: binding} of what other libraries must define, less what carries a version of glibc or gcc."""
    file = elf()
    versions = file.get_section_by_name(".gnu.version")
    return {
        symbol.name: symbol["st_info"]["bind"]
        for index, symbol in enumerate(file.get_section_by_name(".dynsym").iter_symbols())
        if symbol["st_shndx"] == "SHN_UNDEF"
        and versions.get_symbol(index)["ndx"] in ("VER_NDX_LOCAL", "VER_NDX_GLOBAL")
    }


def test_holds_machine_code_for_each_declared_arch():
    assert set(re.findall(r"\.(sm_\w+)\.cubin", cuobjdump("--list-elf"))) == set(map(sm, ARCHS))


def test_holds_ptx_as_declared():
    found = set(re.findall(r"\.(sm_\w+)\.ptx", cuobjdump("--list-ptx")))
    assert found == set(map(sm, PTX))


def test_knows_which_gpus_it_can_run_on():
    """Machine code runs on its own and later minor versions of a major one, PTX on all that is not older."""
    archs, ptx = ([tuple(map(int, arch.split("."))) for arch in names] for names in (ARCHS, PTX))
    for gpu in itertools.product(range(5, 14), range(10)):
        expected = any(a[0] == gpu[0] and a <= gpu for a in archs) or any(p <= gpu for p in ptx)
        assert bool(library.fastln_supports_arch(*gpu)) == expected, gpu


@pytest.mark.parametrize("arch", ARCHS)
def test_each_arch_has_every_kernel(arch):
    functions = resource_usage()[sm(arch)]
    assert [k.name for k in fastln.KERNELS if not any(is_of(k, function) for function in functions)] == []


@pytest.mark.parametrize("arch", ARCHS)
def test_no_kernel_spills_registers(arch):
    usage = resource_usage()[sm(arch)]
    assert usage
    assert {name: use for name, use in usage.items() if use["STACK"] or use["LOCAL"]} == {}


def test_no_kernel_touches_local_memory():
    local = {name for name, texts in memory_instructions().items() if any(t[:3] in ("LDL", "STL") for t in texts)}
    assert local == set()


@pytest.mark.skipif("9.0" not in ARCHS, reason="the first arch on which a kernel may begin before another ends")
def test_no_kernel_reads_or_writes_before_the_kernel_before_it_has_ended():
    # That one may have made what is read, parameters too.
    code = instructions("9.0")
    assert len(code) > 400
    waits = {name: texts for name, texts in code.items() if any("ACQBULK" in text for text in texts)}
    assert {name for name in code.keys() - waits.keys() if "fastln" in name} == set()
    assert {name: texts[0] for name, texts in waits.items() if "ACQBULK" not in texts[0]} == {}


@pytest.mark.parametrize("name", ["f32x4", "f16x8_pack_f16", "f16x8_pack_f32"])
@pytest.mark.parametrize("operation", ["LDG", "STG"])
def test_wide_kernel_moves_128_bits_at_a_time(name, operation):
    kernel = next(kernel for kernel in fastln.KERNELS if kernel.name == name)
    assert {function: sizes for function, sizes in widths(kernel, operation).items() if "128" not in sizes} == {}


@pytest.mark.parametrize("operation", ["LDG", "STG"])
def test_f16x8_f16_moves_32_bits_at_a_time(operation):
    # 64-bit loads are the pairs of a float32 weight or bias; float16 never takes one.
    allowed = {"LDG": {"16", "32", "64"}, "STG": {"16", "32"}}[operation]
    kernel = next(kernel for kernel in fastln.KERNELS if kernel.name == "f16x8_f16")
    for sizes in widths(kernel, operation).values():
        assert "32" in sizes
        assert sizes <= allowed


def test_needs_no_cuda_library_and_no_python():
    needed = {entry.needed for entry in dynamic_entries("DT_NEEDED")}
    # libtorch.so itself brings the CUDA half of torch, where there is one.
    assert {"libtorch.so", "libtorch_cpu.so"} <= needed
    assert {name for name in needed if re.match(r"lib(torch_cuda|torch_python|c10|cuda|nv|python)", name)} == set()


def test_has_no_path_of_the_machine_that_built_it():
    assert [*dynamic_entries("DT_RPATH"), *dynamic_entries("DT_RUNPATH")] == []
    # Checks of torch's and of ours name their source by __FILE__: it stays, less the folders before it.
    sources = set(re.findall(rb"(?<=\0)[^\0-\x1f]+\.(?:cpp|cc|c|cuh|cu|hpp|h)(?=\0)", LIBRARY.read_bytes()))
    assert {name for name in sources if name.startswith(b"/")} == set()
    assert b"torch/csrc/stable/library.h" in sources


def test_takes_of_torch_only_its_stable_abi():
    # No C++ symbol either: those of torch change from version to version, and those of the standard
    # library must come from libstdc++, not from what some builds of libtorch happen to export.
    strong = {name for name, binding in undefined_symbols().items() if binding == "STB_GLOBAL"}
    assert strong
    assert {name for name in strong if not name.startswith(("aoti_torch_", "torch_"))} == set()


def test_what_a_cpu_only_torch_lacks_is_weak():
    assert undefined_symbols().get("aoti_torch_get_current_cuda_stream") == "STB_WEAK"


def test_keeps_its_cuda_runtime_to_itself():
    exported = [s.name for s in elf().get_section_by_name(".dynsym").iter_symbols() if s["st_shndx"] != "SHN_UNDEF"]
    assert "fastln_build_info" in exported
    assert [name for name in exported if name.startswith(("cuda", "__cuda", "cu"))] == []


def test_needs_no_newer_glibc_than_its_platform_tag_says():
    tag = re.search(r"^Tag: (\S+)$", importlib.metadata.distribution("fastln").read_text("WHEEL"), re.MULTILINE)[1]
    promised = re.search(r"manylinux_(\d+)_(\d+)", tag)
    # A linux_* tag promises nothing but the machine that built it.
    limit = (
        tuple(map(int, promised.groups()))
        if promised
        else tuple(map(int, os.confstr("CS_GNU_LIBC_VERSION")[6:].split(".")))
    )
    needed = [
        auxiliary.name
        for _, entries in elf().get_section_by_name(".gnu.version_r").iter_versions()
        for auxiliary in entries
        if auxiliary.name.startswith("GLIBC_")
    ]
    assert needed
    assert [name for name in needed if tuple(map(int, name[6:].split("."))) > limit] == []
