"""A run on TPU nodes of Google Kubernetes Engine: one JobSet of one TPU slice, with kubectl or xpk.

    python launch/gke.py apply  --name RUN --topology v5p:4x4x4 --image IMAGE --bucket BUCKET --
                                compass train CONFIG --run-dir /gcs/RUN
    python launch/gke.py logs   --name RUN             follows worker 0's output (--worker N) over
                                all restarts, to the run's end
    python launch/gke.py status --name RUN
    python launch/gke.py delete --name RUN
    python launch/gke.py render ...                    apply's manifest alone
    python launch/gke.py xpk    --cluster CLUSTER ...  the same run through `xpk workload create`

A failed worker restarts the JobSet, at most --max-restarts times; a preempted node, and a run that
saved at SIGTERM, restart it without being counted. --bucket mounts a bucket at /gcs (Cloud Storage
FUSE): a run whose directory is there resumes from its last checkpoint. --dry-run prints the calls.
The exit status is that of kubectl or xpk; of `logs`, 0 if the run completed and 1 if it failed for
good. COMPASS_POLL_S: seconds between two looks of `logs` (default: 5).
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence

import yaml
from jobset import GRACE_S, MOUNT_OPTIONS, environment, manifest
from slices import GkeError, slice_of

LOST = 75  # compass's exit status when another worker is gone
POLL_S = os.environ.get("COMPASS_POLL_S", "5")
EXAMPLE = (
    "python launch/gke.py {} --name run1 --topology v5p:4x4x4 --image"
    " us-docker.pkg.dev/PROJECT/REPO/compass:1 {} -- compass train configs/my_run.py --run-dir"
    " /gcs/run1"
)
STORAGE = (
    "xpk mounts storages that its cluster knows. Once: xpk storage attach {0} --type=gcsfuse"
    " --bucket={0} --mount-point=/gcs --readonly=false --size=1 --auto-mount=false"
    " --mount-options={1} --cluster=... --project=... --zone=...; then --storage {0} instead of"
    " --bucket {0}"
)


def kubectl(args: argparse.Namespace, *words: str) -> list[str]:
    """Returns a kubectl call in the context and namespace of the options."""
    where = [
        f"--{name}={value}" for name in ("context", "namespace") if (value := getattr(args, name))
    ]
    return ["kubectl", *where, *words]


def calls(args: argparse.Namespace) -> list[tuple[list[str], str | None]]:
    """Returns the programs that an action calls, each with its standard input."""
    if args.action == "apply":
        return [
            (
                kubectl(args, "apply", "--filename", "-"),
                yaml.safe_dump(manifest(args), sort_keys=False),
            )
        ]
    if args.action == "xpk":
        return [(xpk(args), None)]
    workers = f"jobset.sigs.k8s.io/jobset-name={args.name}"
    if args.action == "logs":
        pods = f"--selector={workers},batch.kubernetes.io/job-completion-index={args.worker}"
        ask = kubectl(
            args,
            "get",
            "jobset",
            args.name,
            '--output=jsonpath={.status.conditions[?(@.status=="True")].type}',
        )
        wait = kubectl(args, "wait", "pod", pods, "--for=condition=Ready", "--timeout=10s")
        read = kubectl(args, "logs", "--follow", "--tail=-1", "--container=compass", pods)
        return [(ask, None), (wait, None), (read, None), (ask, None)]
    if args.action == "status":
        return [
            (kubectl(args, "get", "jobset", args.name), None),
            (kubectl(args, "get", "pods", "--output=wide", f"--selector={workers}"), None),
        ]
    return [(kubectl(args, "delete", "jobset", args.name), None)]


def follow(ask: list[str], wait: list[str], read: list[str]) -> int:
    """Prints a worker's output, attempt by attempt, until the JobSet has ended; returns 0 if it
    completed, 1 if it failed.
    """
    answered, failures, message, since = False, 0, "", []
    while True:
        completed = subprocess.run(ask, stdout=subprocess.PIPE, text=True, check=False)
        conditions = {"Completed", "Failed"} & set(completed.stdout.split())
        failures = failures + 1 if completed.returncode else 0
        # A failure of the first query (no such JobSet) ends the command at once. A later one may be
        # a short outage of the cluster: the query is repeated until it fails five times in a row.
        if failures and (failures == 5 or not answered):
            return completed.returncode
        answered = True
        pod = (
            None
            if conditions or failures
            else subprocess.run(wait, capture_output=True, text=True, check=False)
        )
        if conditions or (pod and not pod.returncode):
            # If the stream broke off, everything is printed again, so that no part is lost;
            # otherwise only the next attempt is printed.
            if not subprocess.run([*read, *since], check=False).returncode:
                since = [f"--since-time={time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}"]
        elif pod and pod.stderr != message:
            message = pod.stderr
            print(
                f"launch/gke.py: waiting for the worker's pod: {message.strip()}", file=sys.stderr
            )
        if conditions:
            return 0 if "Completed" in conditions else 1
        time.sleep(float(POLL_S))


def xpk(args: argparse.Namespace) -> list[str]:
    """Returns the call that makes the same run through xpk, which writes the JobSet itself (and
    queues it with Kueue on clusters that it made).
    """
    generation, topology, _ = slice_of(args.topology)
    where = [
        f"--{name}={value}"
        for name in ("project", "zone", "namespace")
        if (value := getattr(args, name))
    ]
    return [
        *(
            "xpk",
            "workload",
            "create",
            f"--cluster={args.cluster}",
            *where,
            f"--workload={args.name}",
        ),
        *(
            f"--tpu-type={generation.xpk}-{topology}",
            f"--docker-image={args.image}",
            f"--max-restarts={args.max_restarts}",
        ),
        *(
            f"--restart-on-exit-codes=1,{LOST}",
            f"--termination-grace-period-seconds={GRACE_S}",
            *(["--spot"] if args.spot else []),
        ),
        *(f"--storage={name}" for name in args.storage),
        *(f"--env={name}={value}" for name, value in environment(args).items()),
        f"--command={shlex.join(args.command)}",
    ]


def shell(call: list[str], text: str | None) -> str:
    """Returns a call as a line for a shell, its standard input as a here-document."""
    return shlex.join(call) if text is None else f"{shlex.join(call)} <<'MANIFEST'\n{text}MANIFEST"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the command line; everything behind -- is the command."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="launch/gke.py", description=__doc__, formatter_class=formatter, allow_abbrev=False
    )
    parser.add_argument("action", choices=("apply", "render", "logs", "status", "delete", "xpk"))
    parser.add_argument("--name", help="of the JobSet")
    parser.add_argument(
        "--topology", help="GENERATION:TOPOLOGY, for example v5p:4x4x4, v6e:16x16, tpu7x:4x4x4"
    )
    parser.add_argument("--image", help="container image with compass in it (launch/Dockerfile)")
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=10,
        help="after failures that are not preemptions (default: %(default)s)",
    )
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="further variables of the workers",
    )
    parser.add_argument(
        "--secret",
        action="append",
        default=[],
        metavar="NAME",
        help="a Kubernetes secret, whose entries become variables of the workers",
    )
    parser.add_argument("--spot", action="store_true", help="on nodes of spot capacity")
    parser.add_argument(
        "--bucket",
        help="mounted at /gcs in every worker; needs GKE's Cloud Storage FUSE CSI driver",
    )
    parser.add_argument(
        "--service-account", help="Kubernetes service account that may write to the bucket"
    )
    parser.add_argument("--context", help="kubectl's context")
    parser.add_argument("--namespace", help="Kubernetes namespace")
    parser.add_argument(
        "--worker", type=int, default=0, help="whose logs to follow (default: %(default)s)"
    )
    parser.add_argument("--cluster", help="xpk: the GKE cluster")
    parser.add_argument("--project", help="xpk: the project of the cluster")
    parser.add_argument("--zone", help="xpk: the zone of the cluster")
    parser.add_argument(
        "--storage",
        action="append",
        default=[],
        help="xpk: a storage of the cluster, which mounts a bucket at /gcs",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the calls instead of making them"
    )
    split = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:split])
    args.command = list(argv[split + 1 :])
    return args


def check(args: argparse.Namespace) -> None:
    """Raises GkeError for missing or unusable settings."""
    starts = args.action in ("apply", "render", "xpk")
    needed = (
        ["name"]
        + (["topology", "image"] if starts else [])
        + (["cluster"] if args.action == "xpk" else [])
    )
    missing = [f"--{name}" for name in needed if not getattr(args, name)] + (
        ["-- COMMAND"] if starts and not args.command else []
    )
    if missing:
        storage = "--storage my-bucket" if args.action == "xpk" else "--bucket my-bucket"
        example = (
            EXAMPLE.format(args.action, storage)
            if starts
            else f"python launch/gke.py {args.action} --name run1"
        )
        raise GkeError(
            f"{args.action}: missing {', '.join(missing)}. For example\n "
            f" {example.replace('xpk ', 'xpk --cluster CLUSTER ')}"
        )
    # Pods are called NAME-slice-0-INDEX-abcde, which has to be a DNS label.
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", args.name):
        raise GkeError(
            f"--name {args.name}: at most 40 lower-case letters, digits and -, with a letter in"
            " front and no - at the end"
        )
    if wrong := [each for each in args.env if "=" not in each]:
        raise GkeError(f"--env {wrong[0]}: write NAME=VALUE")
    if not re.fullmatch(r"\d+(\.\d+)?", POLL_S):
        raise GkeError(f"COMPASS_POLL_S={POLL_S}: must be a number of seconds")
    if args.max_restarts < 0:
        raise GkeError(f"--max-restarts {args.max_restarts}: 0 or more")
    if starts:
        slice_of(args.topology)
        check_bucket(args)


def check_bucket(args: argparse.Namespace) -> None:
    """Raises GkeError for a bucket that cannot be mounted, and for a run directory that would not
    be on one.
    """
    if args.bucket and not re.fullmatch(r"[a-z0-9][-a-z0-9_.]+[a-z0-9]", args.bucket):
        hint = "Say --bucket my-bucket and --run-dir /gcs/run1 for gs://my-bucket/run1"
        raise GkeError(f"--bucket {args.bucket}: the name alone, without gs:// and folders. {hint}")
    if args.secret and args.action == "xpk":
        raise GkeError("xpk: no --secret; xpk has none. Start the run with `apply`")
    if args.bucket and args.action == "xpk":
        raise GkeError(f"xpk: no --bucket. {STORAGE.format(args.bucket, MOUNT_OPTIONS)}")
    line = f" {' '.join(args.command)} "
    run_dir_option = re.search(r""" --run[-_]dir[ =]['"]?(\S*)""", line)
    run_dir = run_dir_option[1] if run_dir_option else ""
    option = "--storage" if args.action == "xpk" else "--bucket"
    if on_bucket := re.fullmatch(r"gs://([^/]*)/*(.*)", run_dir):
        raise GkeError(
            f"a run directory is a path: say {option} {on_bucket[1]} (in front of --) and --run-dir"
            f" /gcs/{on_bucket[2]}"
        )
    if re.match(r"/gcs(/|$)", run_dir) and not args.bucket and args.action != "xpk":
        raise GkeError(
            "the run directory is on a bucket, and --bucket is missing: it would end with the pod"
        )
    # Only `compass train`, `sft` and `train-judge` need a run directory.
    if (
        run_dir_option or re.search(r"[ /](compass|compass_jax) (train|sft|train-judge) ", line)
    ) and not run_dir.startswith("/"):
        wrong = f"--run-dir {run_dir} is relative" if run_dir else "--run-dir is missing"
        say = (
            f"Say {option} {args.bucket or 'my-bucket'} (in front of --) and --run-dir"
            f" /gcs/{args.name}"
        )
        raise GkeError(
            f"{wrong}: the run would be on each pod's own disk, which the others do not see and"
            f" which ends with the pod. {say}"
        )


def main(argv: Sequence[str]) -> int:
    """Runs one action; returns the exit status of the program that it called."""
    args = parse(argv)
    try:
        check(args)
    except GkeError as error:
        print(f"launch/gke.py: {error}", file=sys.stderr)
        return 2
    if args.action == "render":
        print(yaml.safe_dump(manifest(args), sort_keys=False), end="")
        return 0
    invocations = calls(args)
    if args.dry_run:
        print("\n".join(shell(call, text) for call, text in invocations))
        return 0
    try:
        if args.action == "logs":
            return follow(*(call for call, _ in invocations[:3]))
        for call, text in invocations:
            status = subprocess.run(call, input=text, text=True, check=False).returncode
            if status:
                return status
    except FileNotFoundError:
        print(f"launch/gke.py: {invocations[0][0][0]} is not on PATH", file=sys.stderr)
        return 127
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
