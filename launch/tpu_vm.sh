#!/usr/bin/env bash
# A run on a TPU VM slice of Google Cloud, through gcloud. launch/tpu_vm.sh help explains.
set -euo pipefail

usage() {
  cat <<'HELP'
launch/tpu_vm.sh COMMAND OPTIONS [-- TRAINING COMMAND]

  create   makes the slice and waits for it; with --spot it queues for spare capacity, which may be taken away at any time
  copy     copies this working tree to every worker, installs it there and mounts the bucket: what git tracks, and what it neither tracks nor
           ignores, without ./runs, ./weights, ./data and names of secrets (.env, keys, credentials)
  files    prints what copy packs, each name ended by a NUL: launch/tpu_vm.sh files | tr '\0' '\n'
  run      mounts the bucket where it is not, and starts the training command on every worker, detached: it survives the end of this shell
  logs     follows a worker's output to its end; exits with the command's own exit status (255: the connection was lost)
  status   state of the slice, and of the command on every worker
  stop     SIGTERM to the command on every worker: a run saves and leaves; watch does not start it again
  resume   create where the slice is gone or preempted, copy, run; leaves a running command alone
  watch    resume and logs, again after every preemption or lost worker, until the command ends; then says how to delete the slice.
           After a failure it prints the last lines of all workers
  delete   deletes the slice (and its place in the queue)

  --name N --zone Z --project P   which slice; always needed
  --type T                        accelerator type, for example v5p-128 or v6e-256: for create, resume, watch
  --version V                     software of the VMs; the documented one of the type where it is left out
  --spot                          with every command, where the slice is spot capacity
  --reserved                      capacity of a reservation; for create, resume, watch
  --create-flag=F                 one more flag of gcloud's create, again for each: --create-flag=--network=mine
  --delete                        watch: deletes the slice at the end, whatever the command's status
  --bucket B                      mounted at /gcs on every worker (gcsfuse): gs://B/run1 is /gcs/run1 there
  --worker W                      whose logs (default: 0)
  --dry-run                       print the commands instead of running them

  launch/tpu_vm.sh watch --name run1 --zone us-east5-a --project my-project --type v5p-128 --spot \
    --bucket my-bucket -- compass train configs/my_run.py --run-dir /gcs/run1

COMPASS_POLL_S: seconds between two looks at a slice that is coming up (default: 30).
HELP
}

fail() {
  printf 'launch/tpu_vm.sh: %s\n' "$*" >&2
  exit 2
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
poll_s=${COMPASS_POLL_S:-30}
name='' zone='' project='' type='' version='' bucket='' spot='' reserved='' delete='' worker=0 dry_run='' training=() given=() create_flags=()

# ---- what is printed and what is run -----------------------------------------------------------------------------------

# One argument as a shell reads it back.
quote() {
  if [[ $1 =~ ^[A-Za-z0-9_./:=@%+,-]+$ ]]; then
    printf '%s' "$1"
  else
    local escaped="'\\''" # no command substitution: it would take line feeds off the end
    printf "'%s'" "${1//\'/$escaped}"
  fi
}

quote_all() {
  local word line=''
  for word in "$@"; do line+="$(quote "$word") "; done
  printf '%s' "${line% }"
}

# Runs a command, or prints it.
call() {
  if [[ $dry_run ]]; then
    quote_all "$@"
    echo
  else
    "$@"
  fi
}

note() { if [[ $dry_run ]]; then echo "# $*"; else echo "launch/tpu_vm.sh: $*" >&2; fi; }

# The two kinds of gcloud calls: on the slice, and on its place in the queue.
tpu_vm() { local verb=$1; shift; call gcloud compute tpus tpu-vm "$verb" "$@" --zone="$zone" --project="$project"; }
queued() { local verb=$1; shift; call gcloud compute tpus queued-resources "$verb" "$@" --zone="$zone" --project="$project"; }

# A host that vanished ends the connection within two minutes; gcloud splits the flag at the space.
on_workers() { tpu_vm ssh "$name" --worker="$1" --ssh-flag='-oServerAliveInterval=30 -oServerAliveCountMax=4' --command="$2"; }

# ---- states ------------------------------------------------------------------------------------------------------------

# `state_of tpu-vm state` -> READY, PREEMPTED, ... or ABSENT; fails where gcloud fails for another reason (no login, no permission).
state_of() {
  local errors state
  errors=$(mktemp)
  if state=$(gcloud compute tpus "$1" describe "$name" --format="value($2)" --zone="$zone" --project="$project" 2>"$errors"); then
    rm -f "$errors"
    echo "$state"
  elif grep -q -e NOT_FOUND -e 'was not found' "$errors"; then
    rm -f "$errors"
    echo ABSENT
  else
    cat "$errors" >&2
    rm -f "$errors"
    return 1
  fi
}

node_state() { state_of tpu-vm state; }
queue_state() { state_of queued-resources state.state; }

# Waits until a state is none of those that pass by themselves; prints the one that came. Once it waits (with `yes`: from the start), a
# gcloud that fails is asked again like one that answers; what it complains of is said once.
settled() {
  local state errors complaint='' waits=${2:-}
  errors=$(mktemp)
  while true; do
    if state=$("$1" 2>"$errors"); then
      if [[ $passing != *" $state "* ]]; then break; fi
      note "$name: $state"
      waits=yes
    else
      if [[ $(<"$errors") != "$complaint" ]]; then cat "$errors" >&2; fi
      complaint=$(<"$errors")
      if [[ ! $waits ]]; then rm -f "$errors"; return 1; fi
    fi
    sleep "$poll_s"
  done
  rm -f "$errors"
  echo "$state"
}
passing=' CREATING STARTING RESTARTING REIMAGING REPAIRING STOPPING DELETING ACCEPTED WAITING_FOR_RESOURCES PROVISIONING SUSPENDING '

# ---- commands ----------------------------------------------------------------------------------------------------------

create() {
  if [[ ! $spot ]]; then
    tpu_vm create "$name" --accelerator-type="$type" --version="$version" ${reserved:+--reserved} ${create_flags[@]+"${create_flags[@]}"}
    return
  fi
  queued create "$name" --node-id="$name" --accelerator-type="$type" --runtime-version="$version" --spot \
    ${create_flags[@]+"${create_flags[@]}"}
  if [[ $dry_run ]]; then
    note "then waits until the state is ACTIVE:"
    queued describe "$name" --format='value(state.state)'
    return
  fi
  local state
  state=$(settled queue_state yes)
  if [[ $state != ACTIVE ]]; then
    note "$name: the queue gave no slice: $state. resume deletes the request and asks again"
    return 1
  fi
}

delete() {
  if [[ $spot ]]; then queued delete "$name" --force --quiet; else tpu_vm delete "$name" --quiet; fi
}

# A slice that can be used: waits for one that is coming up, replaces one that was taken away.
ensure() {
  local queue=ABSENT node
  if [[ $dry_run ]]; then
    note "asks for the state; where the slice is gone (what is left of it is deleted first):"
    tpu_vm describe "$name" --format='value(state)'
    create
    return
  fi
  if [[ $spot ]]; then queue=$(settled queue_state); fi
  node=$(settled node_state)
  case $node in
    READY) return ;;
    ABSENT | PREEMPTED | TERMINATED) note "$name: $node, asking for a new one" ;;
    *) fail "$name: $node. Start or delete it, then try again" ;;
  esac
  if [[ $queue != ABSENT ]]; then
    queued delete "$name" --force --quiet
  elif [[ $node != ABSENT ]]; then
    tpu_vm delete "$name" --quiet
  fi
  create
}

# Whether a file's name is one that secrets have. It would go to every worker.
is_secret() {
  local status=0
  shopt -s nocasematch
  has_secret_name "$1" || status=1
  shopt -u nocasematch
  return "$status"
}

has_secret_name() {
  case /$1 in
    */.ssh/* | */.aws/* | */.azure/* | */.gcloud/* | */.kube/* | */.docker/* | */.gnupg/*) return ;;
  esac
  case ${1##*/} in
    .env | .env.* | .envrc | *.env | *.pem | *.key | *.p12 | *.pfx | *.jks | *.keystore | *.token | token | hf_token*) return ;;
    id_rsa* | id_dsa* | id_ecdsa* | id_ed25519* | .netrc | _netrc | .npmrc | .pypirc | .git-credentials | .htpasswd | .boto) return ;;
    *credential* | *secret* | *password* | *service?account*.json | application_default*.json | kubeconfig*) return ;;
  esac
  return 1
}

# The files of the tree, each name ended by a NUL: those of git, else all.
all_files() {
  if git -C "$root" rev-parse --is-inside-work-tree >/dev/null 2>&1; then
    git -C "$root" ls-files -z
    git -C "$root" ls-files -z --others --exclude-standard -x /runs -x /weights -x /data -x .venv -x __pycache__
  else
    (cd "$root" && find . \( -name .git -o -name .venv -o -name __pycache__ -o -name '*.egg-info' -o -path ./runs -o -path ./weights \
      -o -path ./data \) -prune -o \( -type f -o -type l \) -print0)
  fi
}

# What `copy` packs, each name ended by a NUL; says on standard error what it leaves out.
files() {
  local path secrets=() count=0
  while IFS= read -r -d '' path; do
    if [[ ! -f $root/$path && ! -L $root/$path ]]; then continue; fi # deleted, or a submodule
    if is_secret "$path"; then
      secrets+=("${path#./}")
    else
      printf './%s\0' "${path#./}"
      count=$((count + 1))
    fi
  done < <(all_files)
  if [[ ${#secrets[@]} -gt 0 ]]; then
    echo "launch/tpu_vm.sh: not copied, by names that secrets have: $(quote_all "${secrets[@]}")" >&2
  fi
  if [[ $count -eq 0 ]]; then fail "$root: git tracks no file there, and ignores all: nothing to copy"; fi
}

# The archive lies in a folder that nobody else can foresee or write to. A dry run prints variables of the shell that runs its output.
# shellcheck disable=SC2016
copy() {
  local folder status=0
  if [[ $dry_run ]]; then
    echo 'folder=$(mktemp -d)'
    echo "$(quote "$root/launch/tpu_vm.sh") files | tar -czf \"\$folder/compass.tar.gz\" -C $(quote "$root") --null -T -"
    echo 'cd "$folder"'
    tpu_vm scp compass.tar.gz "$name:compass.tar.gz" --worker=all
    echo 'cd "$OLDPWD" && rm -rf "$folder"'
  else
    folder=$(mktemp -d)
    (files | tar -czf "$folder/compass.tar.gz" -C "$root" --null -T - && cd "$folder" &&
      tpu_vm scp compass.tar.gz "$name:compass.tar.gz" --worker=all) || status=$?
    rm -rf "$folder"
    if [[ $status -ne 0 ]]; then return "$status"; fi
  fi
  on_workers all 'rm -rf compass && mkdir compass && tar -xzf compass.tar.gz -C compass && rm compass.tar.gz && compass/launch/worker.sh install'
  mount_bucket
}

# On all workers before anything starts on one: a worker where it fails says so, and the call fails.
mount_bucket() { if [[ $bucket ]]; then on_workers all "compass/launch/worker.sh mount_bucket $bucket"; fi; }

run() {
  mount_bucket
  on_workers all "compass/launch/worker.sh start $(quote_all "${training[@]}")"
}

logs() { on_workers "$worker" 'compass/launch/worker.sh follow'; }

stop() { on_workers all 'compass/launch/worker.sh stop'; }

status() {
  local node
  if [[ $dry_run ]]; then
    tpu_vm describe "$name" --format='value(state)'
  else
    node=$(node_state)
    echo "$name: $node"
    if [[ $node != READY ]]; then return 0; fi
  fi
  on_workers all "$ask"
}
# shellcheck disable=SC2016  # expanded on the worker
ask='test -x compass/launch/worker.sh || { echo "$(hostname): no command yet"; exit 0; }; compass/launch/worker.sh status'

resume() {
  local answer
  ensure
  if [[ ! $dry_run ]]; then
    answer=$(on_workers all "$ask")
    if [[ $answer == *': running'* && ! $answer =~ ': '(ended|killed|'no command') ]]; then
      note "$name: the command is running already"
      return
    fi
  fi
  copy
  on_workers all "compass/launch/worker.sh restart $(quote_all "${training[@]}")"
}

# How the command ended, from what all workers answer: a status, behind `stopped` where `stop` was called, and behind `ending` where others
# still run it. Or `running`; `gone`, where there is no slice or no command; `silent`, where gcloud or a worker does not answer.
outcome() {
  local node answer line ended status rank best=0 running='' stopped=''
  node=$(node_state) || { echo silent; return; }
  if [[ $node != READY ]]; then echo gone; return; fi
  answer=$(on_workers all "$ask") || { echo silent; return; }
  # What ended by itself counts before what that did to the others, and a run that saved before one that lost it. Killed: its VM restarted.
  while read -r line; do
    ended=''
    if [[ $line =~ ': ended with status '([0-9]+) ]]; then ended=${BASH_REMATCH[1]}; fi
    if [[ $line == *': killed'* ]]; then ended=killed; fi
    if [[ $line == *': running'* ]]; then running=running; fi
    if [[ $line == *', stopped' ]]; then stopped='stopped '; fi
    case $ended in '') rank=0 ;; 0) rank=1 ;; killed) rank=2 ;; 75 | 134) rank=3 ;; 143) rank=4 ;; *) rank=5 ;; esac
    if [[ $rank -gt $best ]]; then best=$rank status=${ended/killed/137}; fi
  done <<<"$answer"
  if [[ $best -eq 0 ]]; then
    echo "${running:-gone}"
  elif [[ $running && $best -lt 5 ]]; then
    echo "ending $stopped$status"
  else
    echo "$stopped$status"
  fi
}

# The outcome once all workers answer. Where the command ends on some alone, the others are given a few looks to follow.
settled_outcome() {
  local result said='' looks=0
  while true; do
    result=$(outcome)
    case $result in
      silent)
        if [[ ! $said ]]; then note "$name: not every worker answers; waiting until all do"; said=yes; fi ;;
      ending*)
        looks=$((looks + 1))
        if [[ $looks -eq 5 ]]; then echo "${result#ending }"; return; fi
        ;;
      *) echo "$result"; return ;;
    esac
    sleep "$poll_s"
  done
}

# What every worker said last: the one that was followed may only have noticed another's failure.
last_lines() {
  note "$name: the last lines of all workers:"
  on_workers all 'compass/launch/worker.sh last' || note "$name: not every worker answers"
}

# Calls of this script, so that what fails in one ends that one alone. Gives up when resume fails five times in a row, and when workers are
# lost five times in a row soon after a start: then it is the command that loses them. 143 without a stop: the VM was being taken away.
attend() {
  local status began lasted_s result failures=0 losses=0
  while true; do
    status=0
    "$0" resume "${given[@]}" || status=$?
    if [[ $status -eq 0 ]]; then
      failures=0
      began=$(date +%s)
      "$0" logs "${given[@]}" || status=$?
      lasted_s=$(($(date +%s) - began))
      if [[ $dry_run ]]; then note "and again after every preemption, until the command ends"; fi
      if [[ $dry_run || $status -eq 0 ]]; then return; fi
      result=$(settled_outcome)
      case $result in gone | running | 0 | *143) ;; *) last_lines ;; esac
      case $result in
        gone | running | 143) note "$name: lost it (status $status)" ;;
        75 | 134)
          if [[ $lasted_s -lt 600 ]]; then losses=$((losses + 1)); else losses=0; fi
          note "$name: a worker was lost (status $result)"
          if [[ $losses -eq 5 ]]; then
            note "$name: the fifth time in a row within 10 minutes of a start: giving up"
            return "$result"
          fi
          ;;
        *) return "${result#stopped }" ;;
      esac
    else
      failures=$((failures + 1))
      if [[ $status -eq 2 || $failures -eq 5 ]]; then return "$status"; fi
    fi
    sleep "$poll_s"
  done
}

# The last line, of a watch that is interrupted too: who leaves has to know what goes on costing.
costs() {
  local words=("$0" delete --name "$name" --zone "$zone" --project "$project")
  if [[ $spot ]]; then words+=(--spot); fi
  note "what is left of the slice costs until it is deleted: $(quote_all "${words[@]}")"
}

watch() {
  local status=0
  trap costs EXIT
  attend || status=$?
  if [[ ! $delete ]]; then return "$status"; fi
  if delete; then trap - EXIT; elif [[ $status -eq 0 ]]; then status=1; fi
  return "$status"
}

# ---- the command line --------------------------------------------------------------------------------------------------

# The software version that the documentation names for a type.
version_of() {
  case $1 in
    v6e-*) echo v2-alpha-tpuv6e ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    v4-*) echo tpu-ubuntu2204-base ;;
    tpu7*) fail "--type $1: TPU VMs end with v6e; launch/gke.py runs on tpu7x" ;;
    *) fail "--type $1 is not known: v4-N, v5litepod-N, v5p-N or v6e-N (N as in v5p-128); for another, give --version too" ;;
  esac
}

# A bucket's name, and a run directory that can be one: compass writes to paths.
check_bucket() {
  if [[ $bucket && ! $bucket =~ ^[a-z0-9][-a-z0-9_.]+[a-z0-9]$ ]]; then
    fail "--bucket $bucket: the name alone, without gs:// and folders. Say --bucket my-bucket and --run-dir /gcs/run1 for gs://my-bucket/run1"
  fi
  if [[ " ${training[*]-} " =~ \ --run[-_]dir[\ =]gs://([^/\ ]*)/*([^\ ]*) ]]; then
    fail "a run directory is a path: say --bucket ${BASH_REMATCH[1]} (in front of --) and --run-dir /gcs/${BASH_REMATCH[2]}"
  elif [[ ! $bucket && " ${training[*]-} " =~ \ --run[-_]dir[\ =]/gcs[/\ ] ]]; then
    fail "the run directory is on a bucket, and --bucket is missing"
  fi
}

# A relative run directory would be on each worker's own disk. Only `compass train`, `sft` and `train-judge` need one.
check_run_dir() {
  local dir='' given_dir=" --run[-_]dir[ =]['\"]?([^ ]*)" starts='[ /](compass|compass_jax) (train|sft|train-judge) ' line=" ${training[*]-} "
  if [[ $line =~ $given_dir ]]; then dir=${BASH_REMATCH[1]}; elif [[ ! $line =~ $starts ]]; then return; fi
  if [[ $dir == /* ]]; then return; fi
  if [[ $dir ]]; then dir=" $dir is relative"; else dir=' is missing'; fi
  fail "--run-dir$dir: the run would be on each worker's own disk, which the others do not see" \
    "and copy replaces. Say --bucket ${bucket:-my-bucket} (in front of --) and --run-dir /gcs/$name"
}

main() {
  local command=${1:-help} needed='name zone project' missing='' option
  if [[ $# -gt 0 ]]; then shift; fi
  given=("$@")
  while [[ $# -gt 0 ]]; do
    case $1 in
      --name | --zone | --project | --type | --version | --bucket | --worker)
        if [[ $# -lt 2 || $2 == --* ]]; then fail "$1: its value is missing"; fi
        printf -v "${1#--}" '%s' "$2"
        shift 2
        ;;
      --spot | --reserved | --delete | --dry-run)
        option=${1#--}
        printf -v "${option//-/_}" yes
        shift
        ;;
      --create-flag=*) create_flags+=("${1#--create-flag=}"); shift ;;
      --create-flag) fail "--create-flag: write it with =, as in --create-flag=--network=mine" ;;
      --) shift; training=("$@"); break ;;
      *) fail "$1 is not known; launch/tpu_vm.sh help lists the options (the training command stands behind --)" ;;
    esac
  done
  case $command in
    help | --help | -h) usage; return ;;
    files) files; return ;;
    create | resume | watch) needed+=' type' ;;
    copy | run | logs | status | stop | delete) ;;
    *) fail "$command is not known: create, copy, files, run, logs, status, stop, resume, watch, delete, help" ;;
  esac
  for option in $needed; do if [[ ! ${!option} ]]; then missing+=" --$option"; fi; done
  if [[ $command =~ ^(run|resume|watch)$ && ${#training[@]} -eq 0 ]]; then missing+=' -- TRAINING COMMAND'; fi
  if [[ $missing ]]; then
    fail "$command: missing$missing. For example
  launch/tpu_vm.sh $command --name run1 --zone us-east5-a --project my-project --type v5p-128 --bucket my-bucket -- compass train configs/my_run.py --run-dir /gcs/run1"
  fi
  if [[ $spot && $reserved ]]; then fail "--spot and --reserved: a slice is one or the other; leave one out"; fi
  check_bucket
  if [[ $command =~ ^(run|resume|watch)$ ]]; then check_run_dir; fi
  if [[ $needed == *type && ! $version ]]; then version=$(version_of "$type"); fi
  if [[ ! $dry_run ]] && ! command -v gcloud >/dev/null; then fail "gcloud is not on PATH: install the Google Cloud CLI"; fi
  "$command"
}

main "$@"
