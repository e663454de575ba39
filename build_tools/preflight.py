"""What a build needs before it starts: an arch list, a CUDA toolkit and a C++ compiler.

Whatever is missing or wrong ends the build with one message that says what to do, before anything is
compiled. Run as a script, this prints the package that brings a CUDA compiler if the machine has none.
"""

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NoReturn

DEFAULT_ARCH_LIST = "8.0;8.6;8.9;9.0;10.0;12.0+PTX"
OLDEST_TORCH = (2, 10)
CUDA_MAJOR = 13  # what a CPU-only torch is built against; a CUDA build of torch names its own
TOOLKIT_PACKAGE = "cuda-toolkit[nvcc,cccl,cudart,crt]==13.0.*"


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit that can build this project."""

    home: Path
    nvcc_version: str  # "13.0.88"
    cudart: Path  # libcudart_static.a

    @property
    def nvcc(self) -> Path:
        return self.home / "bin" / "nvcc"


def refuse(message: str) -> NoReturn:
    """End the build with a message and no traceback."""
    raise SystemExit(f"\nfastln cannot be built: {message}\n")


def import_torch() -> ModuleType:
    """Import torch, or refuse if it is absent, too old or not a CUDA or CPU build."""
    try:
        import torch
    except ImportError as error:
        refuse(
            f"it compiles against torch, which does not import here ({error}). Install torch >= 2.10 "
            "first, or leave out --no-build-isolation."
        )
    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH:
        refuse(f"it needs torch >= 2.10; this is torch {torch.__version__}.")
    if torch.version.hip:
        refuse(f"its kernels are CUDA; this torch is built for ROCm ({torch.__version__}).")
    return torch


def cuda_major(torch: ModuleType) -> int:
    """The major version of CUDA to build with: torch's own, so that both ask the same of the driver."""
    return int(torch.version.cuda.split(".")[0]) if torch.version.cuda else CUDA_MAJOR


def arch_list() -> str:
    """The compute capabilities to build for, as "8.0;9.0+PTX", from TORCH_CUDA_ARCH_LIST or the default."""
    text = os.environ.get("TORCH_CUDA_ARCH_LIST", DEFAULT_ARCH_LIST)
    entries = list(dict.fromkeys(re.split(r"[;\s]+", text.strip("; \t\n"))))
    bad = [entry for entry in entries if not re.fullmatch(r"\d{1,2}\.\d(\+PTX)?", entry)]
    if bad:
        what = "is empty" if bad == [""] else f"has {', '.join(map(repr, bad))} in it"
        refuse(
            f"TORCH_CUDA_ARCH_LIST={text!r} {what}. It takes compute capabilities such as '8.0;9.0+PTX', "
            "separated by semicolons or spaces, without letters (no sm_90, 9.0a or 10.0f). "
            f"Unset, it is '{DEFAULT_ARCH_LIST}'."
        )
    return ";".join(entries)


def check_archs(archs: str, toolkit: Toolkit) -> None:
    """Refuse compute capabilities that this nvcc cannot compile for."""
    listing = subprocess.run([toolkit.nvcc, "--list-gpu-code"], capture_output=True, text=True).stdout
    known = [f"{code[:-1]}.{code[-1]}" for code in re.findall(r"sm_(\d+)\b", listing)]
    unknown = [arch for arch in archs.replace("+PTX", "").split(";") if arch not in known]
    if known and unknown:
        refuse(
            f"nvcc {toolkit.nvcc_version} in {toolkit.home} does not compile for {', '.join(unknown)}. "
            f"It knows {', '.join(known)}; set TORCH_CUDA_ARCH_LIST to some of these."
        )


def check_host_compiler() -> None:
    """Refuse if there is no C++ compiler, for our sources ($CXX) or for nvcc ($CC)."""
    for command in (os.environ.get("CXX") or "g++", os.environ.get("CC") or "g++"):
        if shutil.which(command.split()[0]) is None:
            refuse(
                f"there is no C++ compiler here ({command!r} is not on PATH). Install g++ "
                "(Debian, Ubuntu: apt install g++; Fedora, RHEL: dnf install gcc-c++), or name yours in CXX."
            )


def inspect_toolkit(home: Path, major: int) -> Toolkit | str:
    """The toolkit in `home`, or the reason why it will not do."""
    nvcc = home / "bin" / "nvcc"
    if not nvcc.is_file():
        return f"{home} has no bin/nvcc"
    try:
        answer = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    except OSError as error:
        return f"{nvcc} does not run ({error.strerror})"
    version = re.search(r"\bV(\d+)\.(\d+\.\d+)", answer)
    if version is None:
        return f"{nvcc} --version names no version"
    if int(version[1]) != major:
        return f"{home} holds CUDA {version[1]}.{version[2]}"
    for folder in ("lib64", "lib", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu"):
        cudart = home / folder / "libcudart_static.a"
        if cudart.is_file() and (home / "include" / "cuda_runtime.h").is_file():
            return Toolkit(home, version[0][1:], cudart)
    return f"{home} has nvcc but not cuda_runtime.h and libcudart_static.a"


def explicit_home() -> str | None:
    """The toolkit that the user names, if any."""
    return os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")


def system_homes() -> Iterator[Path]:
    """Where this machine may keep a toolkit. One that the user names is the only one."""
    if home := explicit_home():
        yield Path(home)
        return
    if nvcc := shutil.which("nvcc"):
        yield Path(nvcc).resolve().parent.parent
    yield Path("/usr/local/cuda")


def package_homes(major: int) -> Iterator[Path]:
    """Where the compiler from the package index lies once it is installed."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec and spec.submodule_search_locations) or ():
        yield Path(folder) / f"cu{major}"


def system_toolkit(major: int) -> Toolkit | None:
    """The first toolkit of the right major version on this machine."""
    found = (inspect_toolkit(home, major) for home in system_homes())
    return next((toolkit for toolkit in found if isinstance(toolkit, Toolkit)), None)


def find_toolkit(major: int) -> Toolkit | str:
    """The toolkit to build with: the machine's own, or the installed package; or why there is none."""
    homes = list(system_homes())
    if not explicit_home():
        homes += package_homes(major)
    found = [inspect_toolkit(home, major) for home in homes]
    for toolkit in found:
        if isinstance(toolkit, Toolkit):
            return toolkit
    if explicit_home():
        advice = "Point CUDA_HOME at one, or unset it."
    elif major == CUDA_MAJOR:
        advice = f"Install one and set CUDA_HOME, or run: pip install '{TOOLKIT_PACKAGE}'"
    else:
        advice = f"Install one and set CUDA_HOME, or use a torch built for CUDA {CUDA_MAJOR}."
    return f"it needs a CUDA {major} toolkit (nvcc and the static runtime). {'; '.join(found)}. {advice}"


def packages_to_install() -> list[str]:
    """What pip must install before a build here: the compiler, unless the machine has a usable one."""
    major = cuda_major(import_torch()) if importlib.util.find_spec("torch") else CUDA_MAJOR
    # A toolkit that the user names is never passed over: where it is wrong, the build says so.
    if explicit_home() or major != CUDA_MAJOR or system_toolkit(major):
        return []
    return [TOOLKIT_PACKAGE]


if __name__ == "__main__":
    print(*packages_to_install(), sep="\n")
