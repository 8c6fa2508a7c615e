# Data and results: in buckets, or on paths that the hosts mount.
# shellcheck shell=bash

bucket_of() { # gs://BUCKET/FOLDER
  local rest=${1#gs://}
  printf 'gs://%s' "${rest%%/*}"
}

# Sets BUCKETS, the distinct buckets of the env file.
name_buckets() {
  local folder
  BUCKETS=()
  for folder in "$DATA_DIR" "$RUNS_DIR"; do
    if [[ $folder == gs://* && " ${BUCKETS[*]-} " != *" $(bucket_of "$folder") "* ]]; then
      BUCKETS+=("$(bucket_of "$folder")")
    fi
  done
}

# Prints the bucket's name if it exists.
find_bucket() {
  ask "" gcloud storage buckets describe "$1" "--project=$PROJECT" '--format=value(name)'
}

# Ends the script if a bucket is missing, before the TPU costs money.
need_buckets() {
  local bucket found
  name_buckets
  for bucket in ${BUCKETS[@]+"${BUCKETS[@]}"}; do
    found=$(find_bucket "$bucket")
    [ -n "$found$dry_run" ] || die "there is no bucket $bucket: $(how_to_create "$bucket")"
  done
}

# Prints how to create a bucket; copy_data does not if DATA_DIR is a path.
how_to_create() { # BUCKET
  if [[ $DATA_DIR == gs://* ]]; then
    echo "gcp/tpu copy_data creates it"
  else
    creation "$1"
    quoted "${creation[@]}"
  fi
}

copy_data() {
  [[ $DATA_DIR == gs://* ]] ||
    die "DATA_DIR is $DATA_DIR, a path on the hosts, but copy_data only copies to gs://: copy the" \
      "shards there yourself"
  [ -n "${LOCAL_DATA-}" ] || die "LOCAL_DATA is not set: it must name the directory of the shards to copy"
  compgen -G "$LOCAL_DATA/train-*" > /dev/null || die "$LOCAL_DATA has no train-* shards:" \
    "write them with imagenet-fast prepare --data_dir=$LOCAL_DATA"
  local megabytes bucket found new=()
  megabytes=$(du -sk "$LOCAL_DATA" | awk '{print int($1 / 1000) + 1}')
  say "$LOCAL_DATA: $megabytes MB, about" \
    "\$$(awk "BEGIN {printf \"%.2f\", $megabytes * 0.02 / 1000}") a month in a bucket (\$0.02 per GB);" \
    "copying takes $((megabytes * 8 / 100 / 60 + 1)) minutes at 100 Mbit/s"
  name_buckets
  for bucket in "${BUCKETS[@]}"; do
    found=$(find_bucket "$bucket")
    [ -n "$found" ] || new+=("$bucket")
  done
  confirm "Copy it to $DATA_DIR${new[*]+, creating ${new[*]}}?"
  for bucket in ${new[@]+"${new[@]}"}; do
    create_bucket "$bucket"
  done
  # Resumes after an interruption, and skips files already copied.
  run gcloud storage rsync "$LOCAL_DATA" "$DATA_DIR" --recursive "--project=$PROJECT"
}

# Sets creation, the command that creates a bucket.
creation() { # BUCKET
  # In the TPU's region, where reading is free.
  creation=(gcloud storage buckets create "$1" "--project=$PROJECT" "--location=${ZONE%-*}"
    --uniform-bucket-level-access)
}

create_bucket() {
  creation "$1"
  run "${creation[@]}" 2> "$scratch/error" || {
    cat "$scratch/error" >&2
    die "cannot create $1: bucket names are global, and somebody else may have this one; choose" \
      "another in DATA_DIR and RUNS_DIR"
  }
}

# Ends the script if the training data are not where the hosts read them.
need_data() {
  [[ $DATA_DIR == gs://* ]] || return 0
  local found
  need_buckets
  found=$(ask "$DATA_DIR" gcloud storage ls "$DATA_DIR/train-*" "--project=$PROJECT")
  [ -n "$found" ] || die "there are no shards in $DATA_DIR: run gcp/tpu copy_data"
}

fetch() {
  local target=$root/runs
  [ -n "$dry_run" ] || mkdir -p "$target/$RUN"
  if [[ $RUNS_DIR == gs://* ]]; then
    run gcloud storage rsync "$RUNS_DIR/$RUN" "$target/$RUN" --recursive "--project=$PROJECT"
  else
    need_tpu
    run "${tpu_vm[@]}" scp "$NAME:$RUNS_DIR/$RUN" "$target/" --recurse --worker=0 "${login[@]}"
  fi
  [ -n "$dry_run" ] || say "runs/$RUN/report.html"
}
