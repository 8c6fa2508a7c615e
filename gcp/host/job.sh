#!/usr/bin/env bash
# Runs on a host: starts training so that it outlives the connection, and tells how it goes.
#
#   job.sh start RUN one_host -- ARGUMENT...             this host's TPU
#   job.sh start RUN pod TPU_NAME -- ARGUMENT...         a whole slice's, from its first host
#   job.sh start RUN worker TF_CONFIG -- ARGUMENT...     this host as one of several workers
#   job.sh follow RUN     the log so far and as it grows, until training ends; its status
#   job.sh status RUN     none, running, died, or "ended STATUS"
#   job.sh stop RUN
#
# ARGUMENTs are imagenet-fast's. What is running is not started again.
set -euo pipefail
verb=$1 run=$2
shift 2
folder=$HOME/imagenet_fast_jobs/$run venv=$HOME/imagenet_fast_venv

main() {
  mkdir -p "$folder"
  case $verb in
    start) start "$@" ;;
    run) run_here "$@" ;;
    follow) follow ;;
    status) status ;;
    stop) stop ;;
    *) echo "job.sh: no such verb: $verb" >&2; return 2 ;;
  esac
}

start() {
  if [ "$(status)" = running ]; then
    echo "already running on $(hostname)"
    return
  fi
  if [ ! -e "$HOME/imagenet_fast.installed" ]; then
    echo "nothing is installed on $(hostname): gcp/tpu install" >&2
    return 3
  fi
  rm -f "$folder/status"
  # A session of its own: ending the connection sends it nothing, and it can be ended as a whole.
  setsid bash "$HOME/imagenet_fast/gcp/host/job.sh" run "$run" "$@" \
    >> "$folder/log" 2>&1 < /dev/null &
  echo $! > "$folder/pid"
  echo "started on $(hostname)"
}

run_here() {
  local kind=$1
  shift
  case $kind in
    one_host)
      # PJRT, by the libtpu that pip installed.
      TF_PLUGGABLE_DEVICE_LIBRARY_PATH=$("$venv/bin/python" -c \
        'import libtpu; print(libtpu.get_library_path())')
      export TF_PLUGGABLE_DEVICE_LIBRARY_PATH NEXT_PLUGGABLE_DEVICE_USE_C_API=true
      export PJRT_DEVICE=TPU TPU_NAME=local
      ;;
    pod)
      # The hosts' servers drive the chips, this process drives the servers.
      export TPU_NAME=$1 TPU_LOAD_LIBRARY=0
      shift
      ;;
    worker)
      export TF_CONFIG=$1
      shift
      ;;
  esac
  shift # the --
  export PYTHONUNBUFFERED=1 TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-2}
  cd "$HOME/imagenet_fast"
  local status=0
  "$venv/bin/python" -m imagenet_fast "$@" || status=$?
  echo "$status" > "$folder/status.new"
  mv "$folder/status.new" "$folder/status"
}

status() {
  if [ -e "$folder/status" ]; then
    echo "ended $(cat "$folder/status")"
  elif [ ! -e "$folder/pid" ]; then
    echo none
  elif is_alive "$(cat "$folder/pid")"; then
    echo running
  else
    echo died
  fi
}

# After a restart of the machine the number may be another process'.
is_alive() { grep -qsz 'job\.sh' "/proc/$1/cmdline"; }

follow() {
  if [ ! -e "$folder/pid" ]; then
    echo "no training was started on $(hostname): gcp/tpu train" >&2
    return 3
  fi
  tail --lines=+1 --follow --pid="$(cat "$folder/pid")" --sleep-interval=0.5 "$folder/log"
  local ended
  ended=$(status)
  [ "$ended" = "ended ${ended#ended }" ] || { echo "training $ended" >&2; return 1; }
  return "${ended#ended }"
}

stop() {
  [ "$(status)" = running ] || { echo "not running on $(hostname)"; return; }
  local pid
  pid=$(cat "$folder/pid")
  kill -TERM -- "-$pid"
  for _ in {1..60}; do
    is_alive "$pid" || break
    sleep 0.5
  done
  kill -KILL -- "-$pid" 2> /dev/null || true
  [ -e "$folder/status" ] || echo 143 > "$folder/status"
  echo "stopped on $(hostname)"
}

main "$@"
