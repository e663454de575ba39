"""The package as a user meets it: import, wheel, sdist, and what a build says when it cannot start."""

import ast
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from fresh import CPU_PYTHON, ROOT, python
from needs import missing

import fastln

LIBRARY = Path(fastln.__file__).with_name("libfastln.so")

COMPARE_WITH_TORCH = """
    import torch, torch.nn.functional as F
    x = torch.randn(16, 320, generator=torch.Generator().manual_seed(0))
    y = torch.ops.fastln.layer_norm_f32x4(x)
    torch.testing.assert_close(y, F.layer_norm(x, (320,)), rtol=1e-5, atol=1e-5)
"""


# ------------------------------------------------------------------------------------------- import


def test_imports_and_is_right_under_a_cpu_only_torch_of_another_version():
    if not CPU_PYTHON.exists():
        missing(".venv-cpu, a virtual environment with another, CPU-only torch")
    answer = python(
        """
        import hashlib, pathlib, torch, fastln
        library = pathlib.Path(fastln.__file__).with_name("libfastln.so")
        print((torch.__version__, torch.version.cuda, hashlib.sha256(library.read_bytes()).hexdigest()))
        """,
        COMPARE_WITH_TORCH,
        interpreter=CPU_PYTHON,
    )
    version, cuda, digest = ast.literal_eval(answer)
    assert cuda is None
    assert version != torch.__version__
    assert digest == hashlib.sha256(LIBRARY.read_bytes()).hexdigest(), "not the binary under test"


def test_import_leaves_cuda_uninitialised():
    python("import fastln, torch; assert not torch.cuda.is_initialized()")


def test_ops_on_cpu_leave_cuda_uninitialised():
    python("import fastln", COMPARE_WITH_TORCH, "assert not torch.cuda.is_initialized()")


def test_imports_twice():
    python("import fastln, importlib; importlib.reload(fastln); import fastln", COMPARE_WITH_TORCH)


def test_imports_from_two_threads_at_once():
    python(
        """
        import threading
        barrier, names = threading.Barrier(2), []
        def work():
            barrier.wait()
            import fastln
            names.append(len(fastln.KERNELS))
        threads = [threading.Thread(target=work) for _ in range(2)]
        [t.start() for t in threads]; [t.join() for t in threads]
        assert names == [8, 8], names
        """,
        COMPARE_WITH_TORCH,
    )


FORK = """
    import os, fastln, torch
    child = os.fork()
    if child == 0:
        try:
            x = torch.ones(4, 8, device=DEVICE)
            zero = not torch.ops.fastln.layer_norm_f32(x).any()
            os._exit(0 if zero else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_a_child_forked_after_the_import_can_use_the_ops(device):
    python(FORK.replace("DEVICE", repr(str(device))))


def test_imports_after_torch_has_used_cuda(cuda):
    python("import torch; torch.ones(1, device='cuda'); import fastln", COMPARE_WITH_TORCH)


def test_command_line_answers_help():
    done = subprocess.run([sys.executable, "-m", "fastln", "--help"], cwd="/", capture_output=True, text=True)
    assert done.returncode == 0
    assert "--device" in done.stdout


# ------------------------------------------------------------------------------------ wheel and sdist


def test_wheel_serves_every_python_on_its_platform():
    wheel = importlib.metadata.distribution("fastln").read_text("WHEEL")
    assert re.search(r"^Root-Is-Purelib: false$", wheel, re.MULTILINE)
    assert re.search(r"^Tag: py3-none-\w*linux\w+$", wheel, re.MULTILINE)
    assert "abi3" not in wheel


def test_metadata_names_torch_alone_and_the_oldest_versions():
    metadata = importlib.metadata.metadata("fastln")
    assert metadata.get_all("Requires-Dist") == ["torch>=2.10"]
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "BSD-3-Clause"


def test_version_is_the_same_everywhere():
    assert fastln.__version__ == fastln.build_info()["version"] == importlib.metadata.version("fastln")


def test_build_info_tells_archs_and_versions():
    info = fastln.build_info()
    entries = info["arch_list"].split(";")
    assert info["archs"] == [entry.removesuffix("+PTX") for entry in entries]
    assert info["ptx"] == [entry.removesuffix("+PTX") for entry in entries if entry.endswith("+PTX")]
    assert re.fullmatch(r"[0-9a-f]{12,}(-dirty)?|unknown", info["commit"])
    assert re.fullmatch(r"\d+\.\d+\.\d+", info["nvcc"])
    assert re.match(r"\d+\.\d+", info["torch_built"])
    assert info["torch_target"] == "2.10"


def test_wheel_holds_the_package_and_nothing_else():
    files = {str(file) for file in importlib.metadata.files("fastln") if "__pycache__" not in str(file)}
    code = {file for file in files if not file.startswith(f"fastln-{fastln.__version__}.dist-info/")}
    assert {"fastln/libfastln.so", "fastln/py.typed", "fastln/__init__.py"} <= code
    if (ROOT / "fastln").is_dir():
        sources = {f"fastln/{path.name}" for path in (ROOT / "fastln").glob("*.py")}
        assert code == sources | {"fastln/libfastln.so", "fastln/py.typed"}


@pytest.fixture(scope="module")
def checkout():
    if not (ROOT / "setup.py").exists():
        pytest.skip("not in a checkout")
    return ROOT


def source_files(checkout, *more):
    """What git tracks, and `more` of its options; in an unpacked sdist, which is no checkout, what that was made of."""
    if (checkout / ".git").exists():
        names = git(checkout, "ls-files", "-z", "--cached", *more).split("\0")
    else:
        listed = (checkout / "fastln.egg-info" / "SOURCES.txt").read_text().splitlines()
        names = [name for name in listed if not name.startswith("fastln.egg-info/")]
    return {name for name in names if (checkout / name).is_file()}


def test_sdist_holds_the_whole_checkout_so_that_make_lint_test_works_from_it(checkout, tmp_path):
    sources = source_files(checkout)
    assert {"setup.py", "Makefile", "src/build_info.cpp", "tests/test_packaging.py"} <= sources
    # A copy: setuptools takes up again whatever it listed in an earlier fastln.egg-info.
    made = ("fastln/libfastln.so", "tests/__pycache__/conftest.pyc", "build/wheel.log")
    for name in (*source_files(checkout, "--others", "--exclude-standard"), *made):
        path = tmp_path / "copy" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name in made:
            path.touch()
        else:
            shutil.copy(checkout / name, path)
    done = subprocess.run(
        [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path, tmp_path / "copy"],
        cwd=tmp_path,  # the copy has a folder named build
        capture_output=True,
        text=True,
    )
    if "No module named build" in done.stderr:
        missing("the `build` package")
    assert done.returncode == 0, done.stderr
    with tarfile.open(tmp_path / f"fastln-{fastln.__version__}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert sources - names == set()
    assert names & set(made) == set()


# ------------------------------------------------------------------------------ the commit of a build


def git(folder, *arguments):
    """What git prints. The tests commit as nobody and sign nothing."""
    if shutil.which("git") is None:
        missing("git")
    identity = ("-c", "user.name=nobody", "-c", "user.email=nobody@localhost", "-c", "commit.gpgsign=false")
    command = ["git", "-c", "safe.directory=*", *identity, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def commit_of(checkout, monkeypatch):
    monkeypatch.syspath_prepend(str(checkout / "build_tools"))
    return pytest.importorskip("commit").commit_of


@pytest.fixture
def repository(tmp_path):
    """A repository with a file, committed."""
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--quiet")
    (folder / "file").write_text("one")
    git(folder, "add", "file")
    git(folder, "commit", "--quiet", "--message", "one")
    return folder


def test_commit_is_that_of_the_checkout_in_12_digits(commit_of, repository):
    digits = commit_of(repository)
    assert re.fullmatch(r"[0-9a-f]{12}", digits)
    assert git(repository, "rev-parse", "HEAD").startswith(digits)
    (repository / "untracked").touch()
    os.utime(repository / "file", (0, 0))
    assert commit_of(repository) == digits


@pytest.mark.parametrize("change", ["edited", "staged", "deleted"])
def test_commit_says_that_tracked_files_differ(commit_of, repository, change):
    clean = commit_of(repository)
    if change == "deleted":
        (repository / "file").unlink()
    else:
        (repository / "file").write_text("two")
    if change == "staged":
        git(repository, "add", "file")
    assert commit_of(repository) == f"{clean}-dirty"


def test_commit_of_a_worktree_is_its_own(commit_of, repository):
    worktree = repository.with_name("worktree")
    git(repository, "worktree", "add", "--quiet", "--detach", worktree)
    (worktree / "file").write_text("two")
    git(worktree, "commit", "--quiet", "--all", "--message", "two")
    assert git(worktree, "rev-parse", "HEAD").startswith(commit_of(worktree))
    assert commit_of(worktree) != commit_of(repository)


def test_commit_is_not_that_of_another_repository(commit_of, repository, tmp_path, monkeypatch):
    inside = repository / "unpacked"
    inside.mkdir()
    assert commit_of(inside) == "unknown"
    monkeypatch.setenv("GIT_DIR", str(repository / ".git"))
    assert commit_of(inside) == "unknown"
    own = commit_of(repository)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    assert commit_of(repository) == own != "unknown"


def test_commit_is_unknown_without_one_and_without_git(commit_of, repository, tmp_path, monkeypatch):
    assert commit_of(tmp_path) == "unknown"
    git(tmp_path, "init", "--quiet")
    assert commit_of(tmp_path) == "unknown"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit_of(repository) == "unknown"


# ----------------------------------------------------------------------------- refusals of a build


@pytest.fixture
def preflight(checkout, monkeypatch):
    monkeypatch.syspath_prepend(str(checkout / "build_tools"))
    return pytest.importorskip("preflight")


def build_refusal(checkout, tmp_path, **environment):
    """The message with which setup.py refuses to compile."""
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--build-lib", tmp_path / "lib", "--build-temp", tmp_path / "temp"],
        cwd=checkout,
        env={key: value for key, value in {**os.environ, **environment}.items() if value is not None},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stdout
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "temp").exists(), "it began to compile"
    return re.search(r"^fastln cannot be built: (.*)$", done.stderr, re.MULTILINE)[1]


def fake_toolkit(folder, version):
    """A folder with an nvcc that only tells its version."""
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version[:4]}, V{version}'\n")
    nvcc.chmod(0o755)
    for part in ("include/cuda_runtime.h", "lib64/libcudart_static.a"):
        (folder / part).parent.mkdir()
        (folder / part).touch()
    return folder


@pytest.mark.parametrize("text", ["", " ; ", "9.x", "sm_90", "9.0a", "10.0f", "90", "8.0,9.0", "native", "9.0;Hopper"])
def test_refuses_malformed_arch_list(preflight, monkeypatch, text):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", text)
    with pytest.raises(SystemExit, match=rf"TORCH_CUDA_ARCH_LIST={re.escape(repr(text))}.*8\.0;9\.0\+PTX"):
        preflight.arch_list()


@pytest.mark.parametrize("text", ["8.0;9.0+PTX", "8.0 9.0+PTX", " 8.0; 9.0+PTX;", "8.0;8.0;9.0+PTX"])
def test_takes_arch_list_with_semicolons_or_spaces(preflight, monkeypatch, text):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", text)
    assert preflight.arch_list() == "8.0;9.0+PTX"


def test_arch_list_unset_is_the_projects_own(preflight, monkeypatch):
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    assert preflight.arch_list() == "8.0;8.6;8.9;9.0;10.0;12.0+PTX"


def test_build_refuses_malformed_arch_list_before_it_compiles(checkout, tmp_path):
    message = build_refusal(checkout, tmp_path, TORCH_CUDA_ARCH_LIST="sm_90")
    assert message.startswith("TORCH_CUDA_ARCH_LIST='sm_90' has 'sm_90' in it.")


def test_build_refuses_arch_that_nvcc_does_not_know(preflight, monkeypatch, tmp_path):
    nvcc = fake_toolkit(tmp_path, "13.0.88") / "bin" / "nvcc"
    toolkit = preflight.inspect_toolkit(tmp_path, 13)
    nvcc.write_text("#!/bin/sh\necho sm_80; echo sm_90; echo sm_120\n")
    preflight.check_archs("8.0;12.0+PTX", toolkit)
    with pytest.raises(SystemExit, match=r"does not compile for 3\.5, 99\.0\. It knows 8\.0, 9\.0, 12\.0"):
        preflight.check_archs("3.5;9.0;99.0+PTX", toolkit)


def test_build_refuses_without_nvcc(checkout, tmp_path):
    message = build_refusal(checkout, tmp_path, CUDA_HOME=str(tmp_path), TORCH_CUDA_ARCH_LIST="9.0")
    assert f"{tmp_path} has no bin/nvcc" in message
    assert "Point CUDA_HOME at one, or unset it." in message


def test_build_refuses_wrong_cuda_major(checkout, tmp_path):
    home = fake_toolkit(tmp_path / "cuda", "11.8.89")
    message = build_refusal(checkout, tmp_path, CUDA_HOME=str(home), TORCH_CUDA_ARCH_LIST="9.0")
    assert f"{home} holds CUDA 11.8.89" in message
    assert re.search(r"needs a CUDA 1\d toolkit", message)


def test_build_refuses_without_cpp_compiler(checkout, tmp_path):
    message = build_refusal(checkout, tmp_path, PATH=str(tmp_path), CXX=None, CC=None, TORCH_CUDA_ARCH_LIST="9.0")
    assert "no C++ compiler" in message
    assert "apt install g++" in message


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("raise ImportError('no such luck')", "Install torch >= 2.10 first, or leave out --no-build-isolation"),
        ("__version__ = '2.9.1'", "it needs torch >= 2.10; this is torch 2.9.1"),
    ],
    ids=["absent", "old"],
)
def test_build_refuses_torch_that_is(checkout, tmp_path, module, expected):
    (tmp_path / "torch.py").write_text(module)
    assert expected in build_refusal(checkout, tmp_path, PYTHONPATH=str(tmp_path), TORCH_CUDA_ARCH_LIST="9.0")


def test_build_asks_the_package_index_for_nvcc_only_where_the_machine_has_none(preflight, monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr(preflight, "cuda_major", lambda torch: 13)
    monkeypatch.setattr(preflight, "system_homes", lambda: [fake_toolkit(tmp_path / "old", "12.4.131")])
    assert preflight.packages_to_install() == ["cuda-toolkit[nvcc,cccl,cudart,crt]==13.0.*"]
    monkeypatch.setattr(preflight, "system_homes", lambda: [fake_toolkit(tmp_path / "new", "13.0.88")])
    assert preflight.packages_to_install() == []
