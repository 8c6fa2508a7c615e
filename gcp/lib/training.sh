# Installing the project on the hosts, and training there.
# shellcheck shell=bash

job='bash imagenet_fast/gcp/host/job.sh'

# Sets ADDRESSES, one of each host.
find_hosts() {
  local answer default=host-0
  [ "$HOSTS_KIND" = one_host ] || default='host-0;host-1'
  answer=$(ask "$default" "${tpu_vm[@]}" describe "$NAME" "${place[@]}" \
    '--format=value(networkEndpoints[].ipAddress)')
  IFS=';' read -r -a ADDRESSES <<< "$answer"
  [ ${#ADDRESSES[@]} -gt 0 ] || die "Google Cloud names no hosts of $NAME"
}

install() {
  local stamp answer worker dead=()
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
    say "this is installed on all ${#ADDRESSES[@]} hosts already"
    return
  fi
  # Python imports some files late: it must not find others then.
  ! grep -qx running <<< "$answer" || die "$RUN is training there: gcp/tpu stop it first"
  run tar -C "$root" -czf "$scratch/imagenet_fast.tar.gz" -T "$scratch/files"
  run "${tpu_vm[@]}" scp "$scratch/imagenet_fast.tar.gz" "$NAME:" --worker=all "${place[@]}" ||
    die "cannot copy to the hosts of $NAME; try again, or gcp/tpu delete and create"
  # Beside what is there, and then in its place.
  on_hosts all "rm -rf imagenet_fast.new && mkdir imagenet_fast.new && tar -xzf imagenet_fast.tar.gz \
-C imagenet_fast.new && rm -rf imagenet_fast && mv imagenet_fast.new imagenet_fast && bash \
imagenet_fast/gcp/host/install.sh $STACK $(quoted "$stamp")" && return
  for worker in "${!ADDRESSES[@]}"; do
    answer=$(ask_hosts "" "$worker" 'cat imagenet_fast.installed' 2> /dev/null) || true
    grep -qxF "$stamp" <<< "$answer" || dead+=("$worker")
  done
  die "the installation did not end well on host ${dead[*]}: run gcp/tpu install again; if that" \
    "does not help, gcp/tpu delete and create"
}

# Ends the script if install would not send a flagfile: better now than when the TPU costs money.
need_flagfiles() {
  local flag file files=("$RECIPE")
  command -v git > /dev/null || die "git tells which files to send, but is not installed"
  for flag in ${TRAIN_FLAGS[@]+"${TRAIN_FLAGS[@]}"}; do
    # Those from / are the hosts' own.
    [[ $flag != ?(-)-flagfile=[!/]* || $flag == *=gs://* ]] || files+=("${flag#*=}")
  done
  for file in "${files[@]}"; do
    [ -f "$root/$file" ] || die "TRAIN_FLAGS name $file, but there is no such file here"
    [ -n "$(list_files "$file" 2> /dev/null)" ] || die "$file is there, but git ignores it or it" \
      "lies outside, so the hosts would not get it: copy it to flags/"
  done
}

# list_files [FILE...]: the files of this checkout, as they are now; without what git ignores.
list_files() {
  local file
  (cd "$root" &&
    git -c core.quotePath=off ls-files --cached --others --exclude-standard -- "$@") |
    while IFS= read -r file; do
      [ ! -f "$root/$file" ] || printf '%s\n' "$file"
    done
}

# Starts training on the hosts where it does not run yet.
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
      die "training does not start on host $worker"
  done
}

train() {
  start
  until logs 0; do
    case $(answered_status) in
      running) say "the connection was lost, but training runs on" ;;
      # While the connection was away.
      'ended 0') break ;;
      *) die "training did not end well; the same command goes on from the last checkpoint; if" \
        "the TPU was taken away, gcp/tpu create and install first, or let gcp/tpu keep_running do" \
        "all" ;;
    esac
    sleep "$POLL_SECONDS"
  done
  [ -n "$dry_run" ] ||
    say "trained: $RUNS_DIR/$RUN; now gcp/tpu fetch, and gcp/tpu delete so that it costs no more"
}

# How training is on host 0, see job.sh; nothing if the host does not answer.
host_status() {
  ask_hosts "" 0 "$job status $(quoted "$RUN")" 2> /dev/null | grep -xE 'none|running|died|ended .*'
}

# The same; asked again some times while there is no answer: the network here may be away.
answered_status() {
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

# Creates, installs and trains to the end, again after each preemption.
keep_running() {
  local again=0 status
  [ -n "$yes$dry_run" ] || show_cost
  confirm "Create $NAME, again whenever it is taken away, and train until $RUN has ended?"
  while :; do
    status=0
    step create || status=$?
    if [ "$status" = 0 ]; then
      if step install && step train; then return; fi
    elif [ "$status" != "$taken_away" ]; then
      exit "$status"
    fi
    again=$((again + 1))
    if was_taken_away; then
      say "$NAME was taken away: creating it again, to go on from the last checkpoint (no. $again)"
    elif [ "$(host_status)" = died ]; then
      say "host 0 was started anew: going on from the last checkpoint (no. $again)"
    else
      die "$NAME was not taken away: gcp/tpu logs shows what happened"
    fi
  done
}

# A process of its own: its failure does not end this one.
step() { "$root/gcp/tpu" "--env=$env_file" --yes ${dry_run:+--dry_run} "$1"; }

# Whether the TPU is gone. A host may be lost a little before Google Cloud says so, and where nothing
# is found, that may be the network here.
was_taken_away() {
  for _ in 1 2 3 4 5; do
    look
    if [ "$REQUEST" != NONE ] && is_gone; then return 0; fi
    sleep "$POLL_SECONDS"
  done
  return 1
}
