# How the other files talk to the user and to gcloud.
# shellcheck shell=bash

# Answers are captured, but what is said goes to the user all the same.
exec 3>&1
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

say() { printf '%s\n' "$*" >&3; }
die() {
  printf 'gcp/tpu: %s\n' "$*" >&2
  exit 1
}

confirm() { # QUESTION
  [ -z "$yes" ] && [ -z "$dry_run" ] || return 0
  local answer
  [ -t 0 ] || die "nobody is there to say yes: add --yes"
  read -r -p "$1 [y/N] " answer
  [[ $answer == [yY]* ]] || die "not done"
}

# run COMMAND...: shows a command and runs it; under --dry_run it is only shown.
run() {
  _show "$@"
  [ -n "$dry_run" ] || "$@"
}

# ask DEFAULT COMMAND...: prints a command's answer; nothing if it says that there is no such thing.
# Any other failure ends the script. Under --dry_run the command is shown and DEFAULT printed.
ask() {
  local default=$1 answer
  shift
  if [ -n "$dry_run" ]; then
    _show "$@"
    printf '%s' "$default"
  elif answer=$("$@" 2> "$scratch/error" < /dev/null); then
    printf '%s' "$answer"
  elif ! grep -qE 'NOT_FOUND|was not found|not found: 404|matched no objects' "$scratch/error"; then
    cat "$scratch/error" >&2
    # Errors repeat the names of projects and TPUs, which may hold any word or number.
    ! grep -qE "PERMISSION_DENIED|HTTPError 403|Permission '.*' denied" "$scratch/error" ||
      die "not allowed: it is somebody else's, or your account lacks a role; the command was: $*"
    die "that was the answer to: $*"
  fi
}

_show() { say "\$ $(quoted "$@")"; }

# Prints words as a shell reads them.
quoted() {
  local word line=()
  for word in "$@"; do
    case $word in
      *[!-A-Za-z0-9_./:=@,+%~]* | '') line+=("'${word//\'/\'\\\'\'}'") ;;
      *) line+=("$word") ;;
    esac
  done
  printf '%s' "${line[*]}"
}

# The beginnings and the ends of gcloud's commands about the TPU.
requests=(gcloud compute tpus queued-resources)
tpu_vm=(gcloud compute tpus tpu-vm)
set_place() { place=("--project=$PROJECT" "--zone=$ZONE" --quiet); }

# on_hosts and ask_hosts: run and ask, on the hosts.
on_hosts() { # WORKER|all COMMAND
  run "${tpu_vm[@]}" ssh "$NAME" "--worker=$1" "--command=$2" "${place[@]}"
}

ask_hosts() { # DEFAULT WORKER|all COMMAND
  ask "$1" "${tpu_vm[@]}" ssh "$NAME" "--worker=$2" "--command=$3" "${place[@]}"
}
