"""Builds fastln/libfastln.so: one shared library for every Python and every torch >= 2.10.

It needs of torch the libtorch stable ABI alone, and holds the CUDA runtime. It is no Python module:
fastln/_library.py loads it. Metadata is in pyproject.toml, the checks in build_tools/preflight.py.
"""

import os
import shutil
import sys
from glob import glob
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel

sys.path.insert(0, str(Path(__file__).resolve().parent / "build_tools"))
import commit
import preflight

torch = preflight.import_torch()
from torch.utils import cpp_extension  # noqa: E402

toolkit = preflight.find_toolkit(preflight.cuda_major(torch))
# torch looks for a toolkit only if it is a CUDA build, and not inside site-packages. Where we have
# found none either, metadata and sdist still work, and build_ext says what is missing.
cpp_extension.CUDA_HOME = str(getattr(toolkit, "home", "/usr/local/cuda"))
if torch.version.cuda is None:
    cpp_extension._check_cuda_version = lambda *_: None  # there is no version to compare with

# torch 2.10 is the oldest to run under, whichever one is built against. No flag may contain "arch":
# torch would then leave out the arch list.
COMMON_FLAGS = ["-O3", "-std=c++20", "-DTORCH_TARGET_VERSION=0x020a000000000000", "-DUSE_CUDA"]
# Device code calls constexpr functions of the host. torch passes this flag too, so far.
NVCC_FLAGS = [*COMMON_FLAGS, "--expt-relaxed-constexpr", "-Xcompiler=-fvisibility=hidden"]

# The one file that uses the facts of a build: version, commit and the like.
FACTS_USER = "src/build_info.cpp"


def nvcc_threads(cuda_files: int) -> str:
    """How many archs nvcc compiles at once: NVCC_THREADS, or the cores left over by one job a file."""
    return os.environ.get("NVCC_THREADS") or str(max(1, (os.cpu_count() or 1) // max(1, cuda_files)))


def without_paths_of_this_machine(include_dirs: list[str]) -> list[str]:
    """Flags that cut __FILE__ down to "src/tensors.h" or "torch/csrc/stable/ops.h". nvcc gets none of them: a path may
    have "arch" in it, and no .cu file uses __FILE__."""
    folders = {os.path.abspath(folder) for folder in (os.getcwd(), *include_dirs)}
    # Where several apply the compiler takes the last: torch may lie in a .venv inside the checkout.
    return [f"-ffile-prefix-map={folder}/=" for folder in sorted(folders, key=len)]


def library() -> cpp_extension.CUDAExtension:
    """The extension, less what CUDAExtension links that would tie it to one torch or one Python."""
    cuda_files = sorted(glob("src/*.cu"))
    extension = cpp_extension.CUDAExtension(
        "fastln.libfastln",
        sources=sorted(cuda_files + glob("src/*.cpp")),
        depends=sorted(glob("src/*.h") + glob("src/*.cuh")),
        extra_compile_args={
            "cxx": [*COMMON_FLAGS, "-g0", "-fvisibility=hidden"],
            "nvcc": [*NVCC_FLAGS, f"--threads={nvcc_threads(len(cuda_files))}"],
        },
    )
    extension.extra_compile_args["cxx"] += without_paths_of_this_machine(extension.include_dirs)
    extension.libraries = []
    extension.extra_link_args = [
        # First, since libtorch_cpu.so may export parts of the standard library too, for itself alone.
        "-lstdc++",
        # libtorch.so must stay although we use no symbol of its own: in a CUDA build it brings
        # libtorch_cuda.so, where our weak symbols bind.
        *("-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-Wl,--as-needed"),
        *(str(getattr(toolkit, "cudart", "")), "-ldl", "-lpthread", "-lrt"),
        # Our copy of the CUDA runtime is private: torch may have another one loaded.
        "-Wl,--exclude-libs,ALL",
    ]
    return extension


class BuildLibrary(cpp_extension.BuildExtension):
    """Checks first, then compiles, with the facts of the build as macros FASTLN_<name>."""

    def run(self) -> None:
        archs = preflight.arch_list()
        preflight.check_host_compiler()
        if isinstance(toolkit, str):
            preflight.refuse(toolkit)
        preflight.check_archs(archs, toolkit)
        os.environ["TORCH_CUDA_ARCH_LIST"] = archs
        for extension in self.extensions:
            extension.define_macros.append(("FASTLN_ARCH_LIST", f'"{archs}"'))
        if torch.version.cuda is None:
            # torch then tells ninja nothing of the headers that a .cu file includes.
            shutil.rmtree(self.build_temp, ignore_errors=True)
        self.facts_giver = self.write_facts(
            VERSION=self.distribution.get_version(),
            COMMIT=commit.commit_of(Path.cwd()),
            NVCC_VERSION=toolkit.nvcc_version,
            TORCH_VERSION=torch.__version__,
        )
        print(f"fastln: building for {archs} with nvcc {toolkit.nvcc_version} from {toolkit.home}", flush=True)
        super().run()

    def write_facts(self, **facts: str) -> str:
        """Write a source that defines the facts and includes the one that uses them. As macros of every file, each
        commit would compile all of them anew; so, ninja compiles this one, and only if a fact has changed."""
        path = Path(self.build_temp, "facts", Path(FACTS_USER).name)
        lines = [f'#define FASTLN_{name} "{value}"\n' for name, value in facts.items()]
        text = "".join([*lines, f'#include "{os.path.abspath(FACTS_USER)}"\n'])
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return str(path)

    def build_extension(self, ext: cpp_extension.CUDAExtension) -> None:
        # Restored, since setuptools lists the sources of a project once more when it has built them.
        sources = ext.sources
        ext.sources = [self.facts_giver if source == FACTS_USER else source for source in sources]
        super().build_extension(ext)
        ext.sources = sources

    def get_ext_filename(self, ext_name: str) -> str:
        """libfastln.so rather than libfastln.cpython-311-x86_64-linux-gnu.so."""
        return f"{ext_name.replace('.', os.sep)}.so"


class PlatformWheel(bdist_wheel):
    """A wheel for one platform and any Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


setup(ext_modules=[library()], cmdclass={"build_ext": BuildLibrary, "bdist_wheel": PlatformWheel})
