# The TPU: its price, creating it, waiting for it, deleting it.
# shellcheck shell=bash

show_cost() {
  say "$ACCELERATOR_TYPE, $PROVISIONING: about \$$DOLLARS an hour for $CHIPS" \
    "chip$([ "$CHIPS" = 1 ] || echo s), from when it is ready until gcp/tpu delete" \
    "(prices: gcp/tpus.tsv)"
  if [ -n "${HOURS-}" ]; then
    say "$HOURS hours: about \$$(awk "BEGIN {printf \"%.0f\", $HOURS * $DOLLARS}")"
  fi
}

# Sets REQUEST (the queued resource's state, or NONE), OWNER, FOUND_TYPE, FOUND_IMAGE, and NODE (the
# TPU's state, or NONE).
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

# Prints the current account as a label value, which marks the TPU's owner.
own_label() {
  local account
  account=$(ask you gcloud config get-value account)
  account=$(printf '%s' "$account" | tr '[:upper:]' '[:lower:]' | tr -c 'a-z0-9_-' _)
  [ -n "$account" ] || die "gcloud has no account: run gcloud auth login"
  printf '%s' "${account:0:63}"
}

# Ends the script if a TPU of this name belongs to somebody else.
check_ours() {
  if [ "$REQUEST" = NONE ]; then
    [ "$NODE" = NONE ] || die "$ZONE already has a TPU named $NAME that gcp/tpu did not create:" \
      "choose another NAME"
    return
  fi
  local own
  own=$(own_label)
  [ "${OWNER-}" = "$own" ] || die "the queued resource $NAME in $ZONE belongs to" \
    "${OWNER:-somebody else}, not to $own: choose another NAME"
}

# Ends the script if the existing TPU does not match the settings.
check_kind() {
  [ "$REQUEST" != NONE ] || return 0
  local way="run gcp/tpu delete first, or choose another NAME"
  [ "$FOUND_TYPE" = "$ACCELERATOR_TYPE" ] ||
    die "$NAME exists as $FOUND_TYPE, but ACCELERATOR_TYPE is $ACCELERATOR_TYPE: $way"
  [ "$FOUND_IMAGE" = "$IMAGE" ] ||
    die "$NAME exists with runtime version $FOUND_IMAGE, but STRATEGY=$STRATEGY and" \
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
  wait_while_deleting
  # Waiting would never end, and its disks may hold something wanted.
  [ "$NODE" != STOPPED ] || die "$NAME is stopped: start it with" \
    "$(quoted "${tpu_vm[@]}" start "$NAME" "${place[@]}"), or run gcp/tpu delete first"
  if is_gone; then
    say "$NAME is no longer usable (request $REQUEST, TPU $NODE)"
    confirm "Delete it and create it again?"
    delete_request
    request
  elif [ "$REQUEST" = NONE ]; then
    confirm "Create it?"
    request
  fi
  [ -n "$dry_run" ] || wait_until_active
}

# A resource that is being suspended or deleted cannot be deleted until that has finished.
wait_while_deleting() {
  while [[ $REQUEST == @(SUSPENDING|DELETING) ]]; do
    sleep "$POLL_SECONDS"
    look
  done
}

# Ends the script if a running ssh-agent has keys but not gcloud's: gcloud then cannot copy to several
# hosts. Without an agent, or with an empty one, gcloud only warns.
need_ssh_key() {
  local key=$HOME/.ssh/google_compute_engine fingerprint
  [ "$HOSTS_KIND" = pod ] && [ -f "$key" ] && ssh-add -l > "$scratch/keys" 2> /dev/null || return 0
  fingerprint=$(ssh-keygen -lf "$key" | awk '{print $2}') || return 0
  grep -qF "$fingerprint" "$scratch/keys" ||
    die "the ssh-agent lacks the key that gcloud uses to copy to the hosts: run ssh-add $(quoted "$key")"
}

# Whether the TPU was preempted, or its request failed.
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
  [ -z "$NETWORK" ] || flags+=("--network=$NETWORK")
  [ "$ADDRESSES" = external ] || flags+=(--internal-ips)
  run "${requests[@]}" create "$NAME" "${flags[@]}" "${place[@]}" 2> "$scratch/error" || {
    cat "$scratch/error" >&2
    die "Google Cloud rejected $NAME: $(advice < "$scratch/error")"
  }
  say "the request stays queued even if you interrupt this script; gcp/tpu delete withdraws it"
}

# Prints what to do about the error on standard input.
advice() {
  local text
  text=$(cat)
  case $text in
    *[Qq]uota*) echo "this project has no quota for $PROVISIONING $ACCELERATOR_TYPE in $ZONE;" \
      "request it (https://cloud.google.com/tpu/docs/quota), or choose another ZONE or" \
      "ACCELERATOR_TYPE" ;;
    *capacity* | *stockout* | *[Rr]esource_[Ee]xhausted* | *"not available"* | *expired*)
      echo "$ZONE has no free $ACCELERATOR_TYPE now; try again later, or with a longer" \
        "WAIT_MINUTES, another ZONE, or PROVISIONING=on_demand" ;;
    *PERMISSION_DENIED* | *"has not been used"*) echo "enable the Cloud TPU API in $PROJECT" \
      "(gcloud services enable tpu.googleapis.com); your account needs the role TPU Admin" ;;
    *) echo "see above" ;;
  esac
}

wait_until_active() {
  local began=$SECONDS shown='' reason
  while :; do
    look
    [ "$REQUEST $NODE" != "ACTIVE READY" ] || break
    if [ "$REQUEST" = FAILED ]; then
      reason=$(ask "" "${requests[@]}" describe "$NAME" "${place[@]}" '--format=value(state)')
      say "$reason"
      delete_request
      die "$NAME was not granted (request $REQUEST, TPU $NODE): $(advice <<< "$reason")"
    elif [ "$REQUEST" != SUSPENDING ] && is_gone; then
      end_as_preempted
    # While it is being suspended it cannot be deleted.
    elif [ "$REQUEST" != SUSPENDING ] && [ $((SECONDS - began)) -ge $((WAIT_MINUTES * 60)) ]; then
      delete_request
      die "no $ACCELERATOR_TYPE within $WAIT_MINUTES minutes; withdrew the request:" \
        "$(advice <<< capacity)"
    elif [ "$shown" != "$REQUEST" ]; then
      say "waiting for $NAME: $REQUEST since $(date +%H:%M)"
      shown=$REQUEST
    fi
    sleep "$POLL_SECONDS"
  done
  say "$NAME is ready and costs money from now on"
  wait_until_reachable
}

# Exits with a status that tells keep_running to create the TPU again.
preempted=3
end_as_preempted() {
  (die "$NAME was preempted (request $REQUEST, TPU $NODE): rerun gcp/tpu create") ||
    exit "$preempted"
}

# New hosts take a while to accept ssh keys.
wait_until_reachable() {
  for _ in {1..20}; do
    if "${tpu_vm[@]}" ssh "$NAME" --worker=all --command=true "${login[@]}" < /dev/null \
      > "$scratch/error" 2>&1; then
      return
    fi
    sleep "$POLL_SECONDS"
  done
  cat "$scratch/error" >&2
  look
  ! is_gone || end_as_preempted
  die "cannot connect to the hosts of $NAME by ssh: does the network allow port 22" \
    "(with ADDRESSES=internal: from 35.235.240.0/20, Google's proxy)?"
}

# Ends the script unless the TPU is ours and ready.
need_tpu() {
  look
  [ -z "$dry_run" ] || return 0
  check_ours
  [ "$REQUEST $NODE" = "ACTIVE READY" ] ||
    die "$NAME is not ready (request $REQUEST, TPU $NODE): run gcp/tpu create"
}

delete() {
  look
  check_ours
  wait_while_deleting
  if [ "$REQUEST" = NONE ] && [ -z "$dry_run" ]; then
    say "there is no $NAME in $ZONE"
  else
    confirm "Delete $NAME and everything on its hosts?"
    delete_request
  fi
  local folder
  for folder in "$DATA_DIR" "$RUNS_DIR"; do
    [[ $folder != gs://* ]] ||
      say "kept, with storage costs: $folder; to delete it: gcloud storage rm --recursive $folder"
  done
}

delete_request() { run "${requests[@]}" delete "$NAME" --force "${place[@]}"; }
