# Messages to the user, and calls of gcloud.
# shellcheck shell=bash

# File descriptor 3 reaches the user even where standard output is captured.
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
  [ -t 0 ] || die "cannot ask for confirmation without a terminal: add --yes"
  read -r -p "$1 [y/N] " answer
  [[ $answer == [yY]* ]] || die "cancelled"
}

# run COMMAND...: prints a command and runs it; with --dry_run, only prints it.
run() {
  _show "$@"
  [ -n "$dry_run" ] || "$@"
}

# ask DEFAULT COMMAND...: prints a command's output, or nothing if the resource does not exist. Any
# other failure ends the script. With --dry_run, shows the command and prints DEFAULT.
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
    # Match whole phrases: errors contain project and TPU names, which may be any word or number.
    ! grep -qE "PERMISSION_DENIED|HTTPError 403|Permission '.*' denied" "$scratch/error" ||
      die "permission denied: the resource belongs to somebody else, or your account lacks a role; the" \
        "command was: $*"
    die "the error above is from: $*"
  fi
}

_show() { say "\$ $(quoted "$@")"; }

# Prints words quoted for a shell.
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

# Prefixes and suffixes of gcloud's TPU commands.
requests=(gcloud compute tpus queued-resources)
tpu_vm=(gcloud compute tpus tpu-vm)
set_place() {
  place=("--project=$PROJECT" "--zone=$ZONE" --quiet)
  # Of commands that connect to hosts: Google's proxy reaches those without an external address.
  login=("${place[@]}")
  [ "$ADDRESSES" = external ] || login+=(--tunnel-through-iap)
}

# on_hosts, ask_hosts: like run and ask, on the TPU's hosts.
on_hosts() { # WORKER|all COMMAND
  run "${tpu_vm[@]}" ssh "$NAME" "--worker=$1" "--command=$2" "${login[@]}"
}

ask_hosts() { # DEFAULT WORKER|all COMMAND
  ask "$1" "${tpu_vm[@]}" ssh "$NAME" "--worker=$2" "--command=$3" "${login[@]}"
}
