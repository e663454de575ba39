"""Which commit a build is made from, so that a library can name it."""

import os
import subprocess
from pathlib import Path

UNKNOWN = "unknown"
# Set in a git hook, for one; they would point git at another repository.
MISLEADING = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")


def commit_of(root: Path) -> str:
    """The commit of a checkout in 12 digits, with "-dirty" where tracked files differ from it; "unknown" if `root` is
    no checkout, or git cannot tell."""
    # A folder, or a file in a worktree. Without it git would go on to the folders above, and sources that lie in some
    # other repository are not of its commit.
    if not (root / ".git").exists():
        return UNKNOWN
    try:
        digits = _git(root, "rev-parse", "--short=12", "HEAD")
        # Compares contents, so that a copied checkout with new file times is not dirty for that.
        changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):  # no git here, no commit yet
        return UNKNOWN
    return f"{digits}-dirty" if changes else digits


def _git(root: Path, *arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in MISLEADING}
    # git distrusts folders of another user, such as one mounted into a container. Whoever builds from a folder runs
    # its code anyway. A build writes nothing into .git, not even fresh file times.
    command = ["git", "-c", "safe.directory=*", "--no-optional-locks", *arguments]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True).stdout.strip()
