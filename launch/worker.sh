#!/usr/bin/env bash
# One worker of a TPU VM slice; launch/tpu_vm.sh copies this file there and calls it. State is in ~/compass-run: log, pid, status.
set -euo pipefail

code=$HOME/compass venv=$HOME/compass-venv state=$HOME/compass-run

# The job's shell runs (and is not another process that got its number).
alive() { [[ -s $state/pid ]] && grep -qs worker.sh "/proc/$(cat "$state/pid")/cmdline"; }

# The images have Python 3.10; uv brings a newer one. A second call installs what changed.
install() {
  cd "$code"
  python3 -m pip install -q --user uv
  [[ -d $venv ]] || python3 -m uv venv -q --python 3.12 "$venv"
  python3 -m uv pip install -q --python "$venv" -c launch/constraints.txt -e '.[tpu]'
}

# Google's package, from the repository that the installation guide of Cloud Storage FUSE names.
install_gcsfuse() {
  local url=https://packages.cloud.google.com/apt key=/usr/share/keyrings/cloud.google.asc patient=(-o DPkg::Lock::Timeout=300)
  sudo curl -fsSL -o "$key" "$url/doc/apt-key.gpg" || return
  sudo tee /etc/apt/sources.list.d/gcsfuse.list >/dev/null <<<"deb [signed-by=$key] $url gcsfuse-$(lsb_release -c -s) main" || return
  sudo apt-get "${patient[@]}" -q update || true # another repository's fault is none of ours
  sudo apt-get "${patient[@]}" -q -y install gcsfuse
}

# Nothing of the metadata is kept: on many TPU machines gcsfuse would keep it for ever, and a worker would not see what others write.
gcsfuse_options=(--implicit-dirs --metadata-cache-ttl-secs=0 --uid="$(id -u)" --gid="$(id -g)" -o allow_other)

# Mounts a bucket at /gcs; leaves it alone where it is mounted. The folder is root's, so that nothing can be written to it while it is not.
mount_bucket() {
  local bucket=$1 there
  if mountpoint -q /gcs; then
    there=$(findmnt -n -o SOURCE --mountpoint /gcs) || true
    [[ $there == "$bucket" ]] || no_bucket "/gcs holds $there already; sudo umount /gcs there, then try again"
    return
  fi
  command -v gcsfuse >/dev/null || install_gcsfuse >&2 || no_bucket 'gcsfuse cannot be installed'
  sudo umount -l /gcs 2>/dev/null || true # what a gcsfuse that died leaves there
  sudo mkdir -p /gcs || no_bucket 'the folder cannot be made'
  sudo gcsfuse "${gcsfuse_options[@]}" "$bucket" /gcs >&2 || no_bucket "gcsfuse failed; may the VM's service account use the bucket?"
  mountpoint -q /gcs || no_bucket 'gcsfuse ended well, but nothing is mounted'
}

no_bucket() {
  echo "$(hostname): cannot mount gs://$bucket at /gcs: $1" >&2
  exit 1
}

# Starts a command that does not end with the connection.
start() {
  mkdir -p "$state"
  if alive; then
    echo "$(hostname): a command is running already, pid $(cat "$state/pid")" >&2
    exit 3
  fi
  rm -f "$state/status" "$state/stopped"
  nohup setsid bash "$0" job "$@" >>"$state/log" 2>&1 </dev/null &
  echo $! >"$state/pid"
}

# What `start` leaves behind: the command, and then its exit status in a file. SIGTERM is for the command; this shell waits for it.
job() {
  local status=0
  trap : TERM INT
  cd "$code"
  export PATH="$venv/bin:$PATH" COMPASS_DISTRIBUTED=auto
  # A new slice finds the programs that an earlier one compiled.
  if mountpoint -q /gcs; then export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-/gcs/compass-programs}; fi
  echo "$(hostname) $(date -u +%FT%TZ): $*"
  "$@" || status=$?
  echo "$status" >"$state/status"
}

# Kills what a run that fell apart left here, then starts.
restart() {
  if alive; then kill -KILL -- "-$(cat "$state/pid")" || true; fi
  for _ in {1..50}; do
    if ! alive; then break; fi
    sleep 0.1
  done
  start "$@"
}

# The log from its last lines on until the command ends; exits with the command's status.
follow() {
  [[ -s $state/pid ]] || { echo "$(hostname): no command yet" >&2; exit 1; }
  tail -n 1000 -s 0.5 -F --pid="$(cat "$state/pid")" "$state/log"
  [[ -s $state/status ]] || { echo "$(hostname): the command was killed" >&2; exit 137; }
  exit "$(cat "$state/status")"
}

# The log's last lines, each behind the worker's name: they come beside those of other workers.
last() { tail -qn 30 "$state/log" 2>/dev/null | cut -c -300 | sed "s/^/$(hostname): /"; }

status() {
  local stopped=''
  if [[ -e $state/stopped ]]; then stopped=', stopped'; fi
  if alive; then
    echo "$(hostname): running$stopped"
  elif [[ -s $state/status ]]; then
    echo "$(hostname): ended with status $(cat "$state/status")$stopped"
  elif [[ -s $state/pid ]]; then
    echo "$(hostname): killed$stopped"
  else
    echo "$(hostname): no command yet"
  fi
}

# To the command alone: what it started hears of it from the command. The mark, until the next start, tells that somebody wanted this: a VM
# that is taken away sends SIGTERM too.
stop() {
  mkdir -p "$state"
  touch "$state/stopped"
  if alive; then pkill -TERM -P "$(cat "$state/pid")"; fi
}

"$@"
