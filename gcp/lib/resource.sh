# The TPU: what it costs, making it, waiting for it, deleting it.
# shellcheck shell=bash

show_cost() {
  say "$ACCELERATOR_TYPE, $PROVISIONING: about \$$DOLLARS an hour for $CHIPS" \
    "chip$([ "$CHIPS" = 1 ] || echo s), from when it is ready until gcp/tpu delete" \
    "(prices: gcp/tpus.tsv)"
  if [ -n "${HOURS-}" ]; then
    say "$HOURS hours: about \$$(awk "BEGIN {printf \"%.0f\", $HOURS * $DOLLARS}")"
  fi
}

# look: sets REQUEST (the queued resource's state, NONE if there is none), OWNER, FOUND_TYPE,
# FOUND_IMAGE, and NODE (the TPU's own state, likewise).
look() {
  local answer fields=state.state
  local node='tpu.nodeSpec[0].node'
  fields+=",$node.labels.imagenet_fast,$node.acceleratorType,$node.runtimeVersion"
  answer=$(ask "" "${requests[@]}" describe "$NAME" "${place[@]}" \
    "--format=value[separator=\"|\"]($fields)")
  IFS='|' read -r REQUEST OWNER FOUND_TYPE FOUND_IMAGE <<< "${answer:-NONE}"
  NODE=$(ask "" "${tpu_vm[@]}" describe "$NAME" "${place[@]}" '--format=value(state)')
  NODE=${NODE:-NONE}
}

# The account in use, as a label's value can have it: tells whose TPU it is.
own_label() {
  local account
  account=$(ask you gcloud config get-value account)
  account=$(printf '%s' "$account" | tr '[:upper:]' '[:lower:]' | tr -c 'a-z0-9_-' _)
  [ -n "$account" ] || die "gcloud knows no account: gcloud auth login"
  printf '%s' "${account:0:63}"
}

# Ends the script unless the TPU of this name is ours, or there is none.
check_ours() {
  if [ "$REQUEST" = NONE ]; then
    [ "$NODE" = NONE ] || die "a TPU named $NAME is in $ZONE already, and gcp/tpu did not make it:" \
      "choose another NAME"
    return
  fi
  local own
  own=$(own_label)
  [ "${OWNER-}" = "$own" ] || die "the queued resource $NAME in $ZONE is" \
    "${OWNER:-somebody else}'s, not $own's: choose another NAME"
}

# Ends the script if the TPU, or what is left of it, is not as the settings have it.
check_kind() {
  [ "$REQUEST" != NONE ] || return 0
  local way="gcp/tpu delete it first, or choose another NAME"
  [ "$FOUND_TYPE" = "$ACCELERATOR_TYPE" ] ||
    die "$NAME is there as $FOUND_TYPE, but ACCELERATOR_TYPE is $ACCELERATOR_TYPE: $way"
  [ "$FOUND_IMAGE" = "$IMAGE" ] ||
    die "$NAME is there with the software $FOUND_IMAGE, but STRATEGY=$STRATEGY and" \
      "RUNTIME_VERSION=${RUNTIME_VERSION-} need $IMAGE: $way"
}

create() {
  show_cost
  need_flagfiles
  need_ssh_key
  need_buckets
  look
  check_ours
  check_kind
  wait_while_it_goes
  # It would be waited for in vain, and what is on its hosts may be wanted.
  [ "$NODE" != STOPPED ] || die "$NAME is there, but stopped: start it by" \
    "$(quoted "${tpu_vm[@]}" start "$NAME" "${place[@]}"), or gcp/tpu delete it first"
  if is_gone; then
    say "what is left of $NAME is dead (request $REQUEST, TPU $NODE)"
    confirm "Delete what is left of it and create it?"
    delete_request
    request
  elif [ "$REQUEST" = NONE ]; then
    confirm "Create it?"
    request
  fi
  [ -n "$dry_run" ] || wait_until_active
}

# What is just being taken away, or deleted, cannot be deleted: that takes a little while.
wait_while_it_goes() {
  while [[ $REQUEST == @(SUSPENDING|DELETING) ]]; do
    sleep "$POLL_SECONDS"
    look
  done
}

# Ends the script if an ssh-agent lacks gcloud's key: gcloud copies to several hosts only by a key
# that the agent holds. Where there is no agent, or an empty one, it only warns.
need_ssh_key() {
  local key=$HOME/.ssh/google_compute_engine fingerprint
  [ "$HOSTS_KIND" = pod ] && [ -f "$key" ] && ssh-add -l > "$scratch/keys" 2> /dev/null || return 0
  fingerprint=$(ssh-keygen -lf "$key" | awk '{print $2}') || return 0
  grep -qF "$fingerprint" "$scratch/keys" ||
    die "the ssh-agent lacks the key by which gcloud copies to the hosts: ssh-add $(quoted "$key")"
}

# Whether the TPU was taken away, or was never given.
is_gone() {
  case $REQUEST in
    SUSPENDING | SUSPENDED | FAILED) return 0 ;;
    ACTIVE) [[ $NODE == @(NONE|PREEMPTED|TERMINATED|DELETING) ]] ;;
    *) return 1 ;;
  esac
}

request() {
  local own flags
  own=$(own_label)
  flags=("--node-id=$NAME" "--accelerator-type=$ACCELERATOR_TYPE" "--runtime-version=$IMAGE"
    "--labels=imagenet_fast=$own" "--valid-until-duration=${WAIT_MINUTES}m")
  [ "$PROVISIONING" = on_demand ] || flags+=(--spot)
  run "${requests[@]}" create "$NAME" "${flags[@]}" "${place[@]}" 2> "$scratch/error" || {
    cat "$scratch/error" >&2
    die "Google Cloud refuses $NAME: $(advice < "$scratch/error")"
  }
  say "if you end this script now, the request stays in the queue: gcp/tpu delete withdraws it"
}

# What to do about an error on standard input.
advice() {
  local text
  text=$(cat)
  case $text in
    *[Qq]uota*) echo "this project has no quota for $PROVISIONING $ACCELERATOR_TYPE in $ZONE;" \
      "ask for it (https://cloud.google.com/tpu/docs/quota), or choose another ZONE or" \
      "ACCELERATOR_TYPE" ;;
    *capacity* | *stockout* | *[Rr]esource_[Ee]xhausted* | *"not available"* | *expired*)
      echo "$ZONE has no free $ACCELERATOR_TYPE now; try again later, or with a longer" \
        "WAIT_MINUTES, another ZONE, or PROVISIONING=on_demand" ;;
    *PERMISSION_DENIED* | *"has not been used"*) echo "enable the Cloud TPU API in $PROJECT" \
      "(gcloud services enable tpu.googleapis.com), and have the role TPU Admin there" ;;
    *) echo "see above" ;;
  esac
}

wait_until_active() {
  local began=$SECONDS told='' reason
  while :; do
    look
    [ "$REQUEST $NODE" != "ACTIVE READY" ] || break
    if [ "$REQUEST" = FAILED ]; then
      reason=$(ask "" "${requests[@]}" describe "$NAME" "${place[@]}" '--format=value(state)')
      say "$reason"
      delete_request
      die "$NAME was not given (request $REQUEST, TPU $NODE): $(advice <<< "$reason")"
    elif [ "$REQUEST" != SUSPENDING ] && is_gone; then
      end_as_taken_away
    # What is just being taken away cannot be deleted: that takes a little while.
    elif [ "$REQUEST" != SUSPENDING ] && [ $((SECONDS - began)) -ge $((WAIT_MINUTES * 60)) ]; then
      delete_request
      die "no $ACCELERATOR_TYPE in $WAIT_MINUTES minutes; the request is withdrawn:" \
        "$(advice <<< capacity)"
    elif [ "$told" != "$REQUEST" ]; then
      say "waiting for $NAME: $REQUEST since $(date +%H:%M)"
      told=$REQUEST
    fi
    sleep "$POLL_SECONDS"
  done
  say "$NAME is ready: it costs money from now on"
  wait_until_reachable
}

# Ends the script with a status of its own, by which keep_running knows that it may go on.
taken_away=3
end_as_taken_away() {
  (die "$NAME was taken away (request $REQUEST, TPU $NODE): gcp/tpu create asks for it again") ||
    exit "$taken_away"
}

# Hosts take a while to know who may come in.
wait_until_reachable() {
  for _ in {1..20}; do
    if "${tpu_vm[@]}" ssh "$NAME" --worker=all --command=true "${place[@]}" < /dev/null \
      > "$scratch/error" 2>&1; then
      return
    fi
    sleep "$POLL_SECONDS"
  done
  cat "$scratch/error" >&2
  look
  ! is_gone || end_as_taken_away
  die "the hosts of $NAME do not let us in: does the network allow ssh (port 22)?"
}

# Ends the script unless the TPU is ours and ready.
need_tpu() {
  look
  [ -z "$dry_run" ] || return 0
  check_ours
  [ "$REQUEST $NODE" = "ACTIVE READY" ] ||
    die "$NAME is not ready (request $REQUEST, TPU $NODE): gcp/tpu create"
}

delete() {
  look
  check_ours
  wait_while_it_goes
  if [ "$REQUEST" = NONE ] && [ -z "$dry_run" ]; then
    say "there is no $NAME in $ZONE"
  else
    confirm "Delete $NAME and all that is on its hosts?"
    delete_request
  fi
  local folder
  for folder in "$DATA_DIR" "$RUNS_DIR"; do
    [[ $folder != gs://* ]] ||
      say "kept, and costing a little: $folder; to remove it: gcloud storage rm --recursive $folder"
  done
}

delete_request() { run "${requests[@]}" delete "$NAME" --force "${place[@]}"; }
