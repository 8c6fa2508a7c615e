# Installs the project on the hosts, and trains there.
# shellcheck shell=bash

job='bash imagenet_fast/gcp/host/job.sh'

# Sets ADDRESSES, one per host.
find_hosts() {
  local answer default=host-0
  [ "$HOSTS_KIND" = one_host ] || default='host-0;host-1'
  answer=$(ask "$default" "${tpu_vm[@]}" describe "$NAME" "${place[@]}" \
    '--format=value(networkEndpoints[].ipAddress)')
  IFS=';' read -r -a ADDRESSES <<< "$answer"
  [ ${#ADDRESSES[@]} -gt 0 ] || die "Google Cloud lists no hosts for $NAME"
}

install() {
  local stamp answer worker failed=()
  need_flagfiles
  need_tpu
  [ -n "$dry_run" ] || check_kind
  find_hosts
  list_files > "$scratch/files"
  stamp="$STACK $( (cd "$root" && cat "$scratch/files" &&
    git hash-object --stdin-paths < "$scratch/files") | git hash-object --stdin)"
  answer=$(ask_hosts "" all "cat imagenet_fast.installed 2> /dev/null || echo nothing; \
[ ! -e imagenet_fast ] || $job status $(quoted "$RUN")")
  if [ "$(grep -cxF "$stamp" <<< "$answer")" = ${#ADDRESSES[@]} ]; then
    say "already installed on all ${#ADDRESSES[@]} hosts"
    return
  fi
  # Python imports some modules late: they must not change under a running training.
  ! grep -qx running <<< "$answer" || die "$RUN is training on the hosts: run gcp/tpu stop first"
  run tar -C "$root" -czf "$scratch/imagenet_fast.tar.gz" -T "$scratch/files"
  run "${tpu_vm[@]}" scp "$scratch/imagenet_fast.tar.gz" "$NAME:" --worker=all "${login[@]}" ||
    die "cannot copy to the hosts of $NAME; try again, or run gcp/tpu delete and create"
  # Unpack beside the old checkout, then replace it.
  on_hosts all "rm -rf imagenet_fast.new && mkdir imagenet_fast.new && tar -xzf imagenet_fast.tar.gz \
-C imagenet_fast.new && rm -rf imagenet_fast && mv imagenet_fast.new imagenet_fast && bash \
imagenet_fast/gcp/host/install.sh $STACK $(quoted "$stamp")" && return
  for worker in "${!ADDRESSES[@]}"; do
    answer=$(ask_hosts "" "$worker" 'cat imagenet_fast.installed' 2> /dev/null) || true
    grep -qxF "$stamp" <<< "$answer" || failed+=("$worker")
  done
  die "installation failed on host ${failed[*]}: rerun gcp/tpu install; if it fails again, run" \
    "gcp/tpu delete and create"
}

# Ends the script if install would not send a flagfile, before the TPU costs money.
need_flagfiles() {
  local flag file path files=("$RECIPE")
  command -v git > /dev/null || die "git is not installed; it lists the files to send"
  for flag in ${TRAIN_FLAGS[@]+"${TRAIN_FLAGS[@]}"}; do
    # Absolute paths are on the hosts.
    [[ $flag != ?(-)-flagfile=[!/]* || $flag == *=gs://* ]] || files+=("${flag#*=}")
  done
  for file in "${files[@]}"; do
    path=$(flagfile_path "$file")
    [ -n "$path" ] || die "TRAIN_FLAGS name $file, but there is no such recipe or file"
    [ -n "$(list_files "$path" 2> /dev/null)" ] || die "$file would not be sent to the" \
      "hosts, because git ignores it or it is outside the checkout: copy it to imagenet_fast/flags/"
  done
}

# flagfile_path NAME: prints a flagfile's path in the checkout, or that of the recipe of this name.
# flags/NAME.flags is a recipe, too: flags/ is a link, beyond which git lists no files.
flagfile_path() {
  local recipe=${1#flags/}
  recipe=imagenet_fast/flags/${recipe%.flags}.flags
  if [ -f "$root/$1" ] && [[ $1 != flags/* || ! -L $root/flags ]]; then
    printf '%s' "$1"
  elif [[ ${1#flags/} != */* ]] && [ -f "$root/$recipe" ]; then
    printf '%s' "$recipe"
  fi
}

# list_files [FILE...]: prints the checkout's existing files, except those that git ignores.
list_files() {
  local file
  (cd "$root" &&
    git -c core.quotePath=off ls-files --cached --others --exclude-standard -- "$@") |
    while IFS= read -r file; do
      [ ! -f "$root/$file" ] || printf '%s\n' "$file"
    done
}

# Starts training on the hosts where it is not running.
start() {
  local worker workers=(0) kind=("$HOSTS_KIND") members='' arguments
  need_data
  need_tpu
  find_hosts
  arguments=(train "--flagfile=$RECIPE" "--data_dir=$DATA_DIR" "--model_dir=$RUNS_DIR/$RUN"
    "--strategy=$STRATEGY" ${TRAIN_FLAGS[@]+"${TRAIN_FLAGS[@]}"})
  if [ "$STRATEGY" = multi_worker ]; then
    workers=("${!ADDRESSES[@]}")
    for worker in "${workers[@]}"; do
      members+="${members:+, }\"${ADDRESSES[worker]}:$((PORT + worker))\""
    done
  elif [ "$HOSTS_KIND" = pod ]; then
    kind=(pod "$NAME")
  fi
  for worker in "${workers[@]}"; do
    if [ "$STRATEGY" = multi_worker ]; then
      kind=(worker "{\"cluster\": {\"worker\": [$members]}, \"task\": {\"type\": \"worker\",\
 \"index\": $worker}}")
    fi
    on_hosts "$worker" "$job start $(quoted "$RUN" "${kind[@]}" -- "${arguments[@]}")" ||
      die "could not start training on host $worker"
  done
}

train() {
  start
  until logs 0; do
    case $(retried_status) in
      running) say "connection lost; training continues" ;;
      # It ended while the connection was lost.
      'ended 0') break ;;
      *) die "training failed; rerun the command to resume from the last checkpoint; if the TPU" \
        "was preempted, run gcp/tpu create and install first, or use gcp/tpu keep_running" ;;
    esac
    sleep "$POLL_SECONDS"
  done
  [ -n "$dry_run" ] ||
    say "trained: $RUNS_DIR/$RUN; next: gcp/tpu fetch, then gcp/tpu delete to end the costs"
}

# Prints the status of training on host 0, see job.sh; nothing if the host does not answer.
host_status() {
  ask_hosts "" 0 "$job status $(quoted "$RUN")" 2> /dev/null | grep -xE 'none|running|died|ended .*'
}

# The same, with retries: the local network may be down.
retried_status() {
  for _ in 1 2 3 4 5; do
    if host_status; then return; fi
    sleep "$POLL_SECONDS"
  done
}

logs() { # [HOST]
  on_hosts "${1:-0}" "$job follow $(quoted "$RUN")"
}

stop() {
  need_tpu
  on_hosts all "$job stop $(quoted "$RUN")"
}

# Creates, installs and trains to the end; starts over after each preemption.
keep_running() {
  local again=0 status
  [ -n "$yes$dry_run" ] || show_cost
  confirm "Create $NAME, recreate it after each preemption, and train until $RUN is complete?"
  while :; do
    status=0
    step create || status=$?
    if [ "$status" = 0 ]; then
      if step install && step train; then return; fi
    elif [ "$status" != "$preempted" ]; then
      exit "$status"
    fi
    again=$((again + 1))
    if was_preempted; then
      say "$NAME was preempted: recreating it and resuming from the last checkpoint (restart $again)"
    elif [ "$(host_status)" = died ]; then
      say "host 0 was restarted: resuming from the last checkpoint (restart $again)"
    else
      die "training ended, but $NAME was not preempted: see gcp/tpu logs"
    fi
  done
}

# Runs in its own process, so its failure does not end this one.
step() { "$root/gcp/tpu" "--env=$env_file" --yes ${dry_run:+--dry_run} "$1"; }

# Whether the TPU was preempted. Retries, because a host may be lost before Google Cloud reports it, and
# because REQUEST is also NONE while the local network is down.
was_preempted() {
  for _ in 1 2 3 4 5; do
    look
    if [ "$REQUEST" != NONE ] && is_gone; then return 0; fi
    sleep "$POLL_SECONDS"
  done
  return 1
}
