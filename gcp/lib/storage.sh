# Data and results: buckets, or paths that the hosts mount.
# shellcheck shell=bash

bucket_of() { # gs://BUCKET/FOLDER
  local rest=${1#gs://}
  printf 'gs://%s' "${rest%%/*}"
}

# Sets BUCKETS, those of the env file, each once.
name_buckets() {
  local folder
  BUCKETS=()
  for folder in "$DATA_DIR" "$RUNS_DIR"; do
    if [[ $folder == gs://* && " ${BUCKETS[*]-} " != *" $(bucket_of "$folder") "* ]]; then
      BUCKETS+=("$(bucket_of "$folder")")
    fi
  done
}

# Prints the bucket's name if it is there.
find_bucket() {
  ask "" gcloud storage buckets describe "$1" "--project=$PROJECT" '--format=value(name)'
}

# Ends the script if a bucket is missing: better now than when the TPU costs money.
need_buckets() {
  local bucket found
  name_buckets
  for bucket in ${BUCKETS[@]+"${BUCKETS[@]}"}; do
    found=$(find_bucket "$bucket")
    [ -n "$found$dry_run" ] || die "there is no bucket $bucket: $(way_to_make "$bucket")"
  done
}

# copy_data refuses where DATA_DIR is a path.
way_to_make() { # BUCKET
  if [[ $DATA_DIR == gs://* ]]; then
    echo "gcp/tpu copy_data makes it"
  else
    creation "$1"
    quoted "${creation[@]}"
  fi
}

copy_data() {
  [[ $DATA_DIR == gs://* ]] ||
    die "DATA_DIR is $DATA_DIR, a path on the hosts: copying is for gs://; put the shards there" \
      "yourself"
  [ -n "${LOCAL_DATA-}" ] || die "LOCAL_DATA is not set: where are the shards to copy?"
  compgen -G "$LOCAL_DATA/train-*" > /dev/null || die "$LOCAL_DATA holds no train-* shards:" \
    "imagenet-fast prepare --data_dir=$LOCAL_DATA writes them"
  local megabytes bucket found new=()
  megabytes=$(du -sk "$LOCAL_DATA" | awk '{print int($1 / 1000) + 1}')
  say "$LOCAL_DATA: $megabytes MB, in a bucket about" \
    "\$$(awk "BEGIN {printf \"%.2f\", $megabytes * 0.02 / 1000}") a month (at \$0.02 a GB);" \
    "at 100 Mbit/s it takes $((megabytes * 8 / 100 / 60 + 1)) minutes"
  name_buckets
  for bucket in "${BUCKETS[@]}"; do
    found=$(find_bucket "$bucket")
    [ -n "$found" ] || new+=("$bucket")
  done
  confirm "Copy it to $DATA_DIR${new[*]+, creating ${new[*]}}?"
  for bucket in ${new[@]+"${new[@]}"}; do
    create_bucket "$bucket"
  done
  # Goes on where it was, and copies nothing twice.
  run gcloud storage rsync "$LOCAL_DATA" "$DATA_DIR" --recursive "--project=$PROJECT"
}

# Sets creation, the command that makes a bucket.
creation() { # BUCKET
  # In the TPU's region: reading from there costs nothing.
  creation=(gcloud storage buckets create "$1" "--project=$PROJECT" "--location=${ZONE%-*}"
    --uniform-bucket-level-access)
}

create_bucket() {
  creation "$1"
  run "${creation[@]}" 2> "$scratch/error" || {
    cat "$scratch/error" >&2
    die "cannot create $1: a bucket's name is taken for the whole world, and somebody else may" \
      "have it; choose another in DATA_DIR and RUNS_DIR"
  }
}

# Ends the script if the training data are not where the hosts will look for them.
need_data() {
  [[ $DATA_DIR == gs://* ]] || return 0
  local found
  need_buckets
  found=$(ask "$DATA_DIR" gcloud storage ls "$DATA_DIR/train-*" "--project=$PROJECT")
  [ -n "$found" ] || die "there are no shards in $DATA_DIR: gcp/tpu copy_data"
}

fetch() {
  local target=$root/runs
  [ -n "$dry_run" ] || mkdir -p "$target/$RUN"
  if [[ $RUNS_DIR == gs://* ]]; then
    run gcloud storage rsync "$RUNS_DIR/$RUN" "$target/$RUN" --recursive "--project=$PROJECT"
  else
    need_tpu
    run "${tpu_vm[@]}" scp "$NAME:$RUNS_DIR/$RUN" "$target/" --recurse --worker=0 "${place[@]}"
  fi
  [ -n "$dry_run" ] || say "runs/$RUN/report.html"
}
