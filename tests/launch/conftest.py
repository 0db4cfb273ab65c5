"""Fakes of the cloud's command-line programs: they record their calls, answer as a test says, and
can play two workers.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Records its arguments and its standard input, and answers by the first rule that is not used up
# and whose words are in the call. If there are workers, ssh runs the remote command in each
# worker's home directory, and scp copies files there.
FAKE = """#!{python} -ISE
import fcntl, json, os, sys

here, words = {here!r}, [{name!r}, *sys.argv[1:]]
stdin = sys.stdin.read() if "-" in words else ""
with open(here + "/calls", "a") as file:
    file.write(json.dumps([words, stdin]) + "\\n")
lock = open(here + "/lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)  # two workers call at the same time
rules = json.load(open(here + "/rules"))
for rule in rules:
    if rule["words"] in " ".join(words) and rule["times"] > 0:
        rule["times"] -= 1
        with open(here + "/rules", "w") as file:
            json.dump(rules, file)
        sys.stdout.write(rule["out"])
        sys.stderr.write(rule["err"])
        sys.exit(rule["status"])
lock.close()
workers = sorted(os.path.join(here, name) for name in os.listdir(here) if name.startswith("worker"))
named = dict(word.split("=", 1) for word in words if word.startswith("--") and "=" in word)
if named.get("--worker", "all") != "all":
    workers = workers[int(named["--worker"]):][:1]
status = 0
for home in workers:
    import shutil, subprocess
    if "scp" in words:
        source, target = words[words.index("scp") + 1 :][:2]
        shutil.copy(source, os.path.join(home, target.split(":")[1]))
    if "ssh" in words:
        env = os.environ | {{"HOME": home}}
        done = subprocess.run(["bash", "-c", named["--command"]], env=env, cwd=home)
        status = status or done.returncode
sys.exit(status)
"""


class Fakes:
    """The fake programs of one test, and the folder that they use."""

    def __init__(self, folder: Path):
        self.folder, self.bin = folder, folder / "bin"
        self.bin.mkdir(parents=True)
        (folder / "rules").write_text("[]")
        # tpu_vm.sh copies the tree in which it lies to the workers: this one is small.
        self.script = folder / "tree" / "launch" / "tpu_vm.sh"
        self.script.parent.mkdir(parents=True)
        for name in ("tpu_vm.sh", "worker.sh"):
            shutil.copy(ROOT / "launch" / name, self.script.parent)
        for name in ("gcloud", "kubectl", "xpk"):
            self.add(name)

    def add(self, name: str) -> None:
        """Adds a program that only records its calls and answers them."""
        (self.bin / name).write_text(
            FAKE.format(python=sys.executable, here=str(self.folder), name=name)
        )
        (self.bin / name).chmod(0o755)

    def answer(
        self, words: str, *outs: str, status: int = 0, err: str = "", times: int = 1
    ) -> None:
        """Sets the answers to calls with `words` in them: each of `outs` in order, `times` times,
        with the exit status `status`.
        """
        rules = json.loads((self.folder / "rules").read_text())
        rules += [
            {"words": words, "out": out, "err": err, "status": status, "times": times}
            for out in outs or [""]
        ]
        (self.folder / "rules").write_text(json.dumps(rules))

    def worker(self, number: int) -> Path:
        """Returns a worker's home directory; once it exists, ssh and scp act on it."""
        home = self.folder / f"worker{number}"
        home.mkdir(exist_ok=True)
        return home

    def run(
        self, *command: str | Path, path: str | None = None, **more: str
    ) -> subprocess.CompletedProcess:
        """Runs a command that finds the fakes on its PATH."""
        env = (
            os.environ
            | {
                "PATH": path or f"{self.bin}:{os.environ['PATH']}",
                "COMPASS_POLL_S": "0",
                "TMPDIR": str(self.folder),
            }
            | more
        )
        return subprocess.run(
            [str(word) for word in command],
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
            cwd=ROOT,
        )

    def vm(self, *words: str, **more: str) -> subprocess.CompletedProcess:
        """Runs launch/tpu_vm.sh."""
        return self.run(self.script, *words, **more)

    def calls(self) -> list[list[str]]:
        """Returns the arguments of every call so far, in order, and forgets them."""
        return [words for words, _ in self.inputs()]

    def inputs(self) -> list[tuple[list[str], str]]:
        """Returns the arguments and the standard input of every call so far, and forgets them."""
        file = self.folder / "calls"
        rows = (
            [tuple(json.loads(line)) for line in file.read_text().splitlines()]
            if file.exists()
            else []
        )
        file.unlink(missing_ok=True)
        return rows


@pytest.fixture
def fakes(tmp_path) -> Fakes:
    """Returns fake gcloud, kubectl and xpk."""
    return Fakes(tmp_path / "fakes")
