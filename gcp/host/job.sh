#!/usr/bin/env bash
# Runs on a host: starts training that outlives the ssh connection, and reports its status.
#
#   job.sh start RUN one_host -- ARGUMENT...             on this host's TPU
#   job.sh start RUN pod TPU_NAME -- ARGUMENT...         on a whole slice, from its first host
#   job.sh start RUN worker TF_CONFIG -- ARGUMENT...     on this host as one of several workers
#   job.sh follow RUN     print the log until training ends, and exit with its status
#   job.sh status RUN     print none, running, died, or "ended STATUS"
#   job.sh stop RUN
#
# ARGUMENTs are those of imagenet-fast. A running job is not started again.
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
    *) echo "job.sh: unknown command $verb" >&2; return 2 ;;
  esac
}

start() {
  if [ "$(status)" = running ]; then
    echo "already running on $(hostname)"
    return
  fi
  if [ ! -e "$HOME/imagenet_fast.installed" ]; then
    echo "imagenet_fast is not installed on $(hostname): run gcp/tpu install" >&2
    return 3
  fi
  rm -f "$folder/status"
  # In its own session: it gets no signal when the connection ends, and can be killed as a group.
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
      # PJRT, with the libtpu installed by pip.
      TF_PLUGGABLE_DEVICE_LIBRARY_PATH=$("$venv/bin/python" -c \
        'import libtpu; print(libtpu.get_library_path())')
      export TF_PLUGGABLE_DEVICE_LIBRARY_PATH NEXT_PLUGGABLE_DEVICE_USE_C_API=true
      export PJRT_DEVICE=TPU TPU_NAME=local
      ;;
    pod)
      # The hosts' servers drive the chips; this process drives the servers.
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

# Not a zombie, and not another process that has the pid after a reboot.
is_alive() { grep -qsz 'job\.sh' "/proc/$1/cmdline"; }

follow() {
  if [ ! -e "$folder/pid" ]; then
    echo "no training was started on $(hostname): run gcp/tpu train" >&2
    return 3
  fi
  local pid ended
  pid=$(cat "$folder/pid")
  # tail itself would also wait for a zombie, which some containers never reap.
  while is_alive "$pid"; do sleep 0.2; done &
  tail --lines=+1 --follow --pid=$! --sleep-interval=0.1 "$folder/log"
  ended=$(status)
  [ "$ended" = "ended ${ended#ended }" ] || { echo "training $ended" >&2; return 1; }
  return "${ended#ended }"
}

stop() {
  [ "$(status)" = running ] || { echo "not running on $(hostname)"; return; }
  local pid
  pid=$(cat "$folder/pid")
  kill -TERM -- "-$pid"
  for _ in {1..300}; do
    is_alive "$pid" || break
    sleep 0.1
  done
  kill -KILL -- "-$pid" 2> /dev/null || true
  [ -e "$folder/status" ] || echo 143 > "$folder/status"
  echo "stopped on $(hostname)"
}

main "$@"
