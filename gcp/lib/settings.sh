# The settings in the env file, and the values derived from them.
# shellcheck shell=bash

_required=(PROJECT ZONE NAME ACCELERATOR_TYPE PROVISIONING DATA_DIR RUNS_DIR RECIPE)
_optional=(LOCAL_DATA RUN TRAIN_FLAGS STRATEGY RUNTIME_VERSION HOURS WAIT_MINUTES POLL_SECONDS PORT
  NETWORK ADDRESSES)

# load_settings FILE: reads and checks the env file; one error lists all missing settings.
load_settings() {
  local file=$1 name missing=() unknown=()
  [ -f "$file" ] || die "there is no env file $file: cp gcp/env.example $file and fill it in"
  # Ignore variables of the calling shell.
  unset "${_required[@]}" "${_optional[@]}"
  STRATEGY=tpu WAIT_MINUTES=120 POLL_SECONDS=15 PORT=8888 TRAIN_FLAGS=() NETWORK='' ADDRESSES=external
  # shellcheck source=/dev/null
  . "$file"

  while IFS= read -r name; do
    case " ${_required[*]} ${_optional[*]} " in
      *" $name "*) ;;
      *) unknown+=("$name") ;;
    esac
  done < <(sed -n 's/^[[:space:]]*\([A-Za-z_][A-Za-z_0-9]*\)=.*/\1/p' "$file")
  [ ${#unknown[@]} = 0 ] || die "$file sets ${unknown[*]}, which does not exist;" \
    "see gcp/env.example for the names"
  for name in "${_required[@]}"; do
    [ -n "${!name-}" ] || missing+=("$name")
  done
  [ ${#missing[@]} = 0 ] || die "$file does not set ${missing[*]}: see gcp/env.example"

  _check PROJECT '[a-z][-a-z0-9:.]*[a-z0-9]' "a project id"
  _check ZONE '[a-z]+-[a-z]+[0-9]+-[a-z0-9]+' 'a zone, such as us-central2-b'
  _check NAME '[a-z]([-a-z0-9]{0,60}[a-z0-9])?' 'at most 62 of a to z, 0 to 9 and -'
  _check ACCELERATOR_TYPE '[a-z0-9]+-[0-9]+' 'a TPU type and a number, such as v4-8'
  _check PROVISIONING 'spot|on_demand' 'spot or on_demand'
  _check STRATEGY 'tpu|multi_worker' 'tpu or multi_worker'
  _check DATA_DIR '(gs:/)?/[^ ]+' 'gs://BUCKET/FOLDER or an absolute path'
  _check RUNS_DIR '(gs:/)?/[^ ]+' 'gs://BUCKET/FOLDER or an absolute path'
  _check WAIT_MINUTES '[1-9][0-9]*' 'a number of minutes'
  _check POLL_SECONDS '[0-9]+([.][0-9]+)?' 'a number of seconds'
  _check PORT '[1-9][0-9]{3,4}' 'a port'
  _check ADDRESSES 'external|internal' 'external or internal'
  [ -z "$NETWORK" ] || _check NETWORK '[a-z]([-a-z0-9]{0,61}[a-z0-9])?' 'the name of a VPC network'
  [ -z "${HOURS-}" ] || _check HOURS '[0-9]+([.][0-9]+)?' 'a number of hours'
  [ -n "$(flagfile_path "$RECIPE")" ] || die "RECIPE is $RECIPE, but there is no such recipe or" \
    "file; recipes are:" $(cd "$root/imagenet_fast/flags" && printf '%s\n' *.flags | sed 's/.flags$//')
  DATA_DIR=${DATA_DIR%/} RUNS_DIR=${RUNS_DIR%/}
  RUN=${RUN:-$(basename "$RECIPE" .flags)}
  # Not "..": it names a folder on the hosts.
  _check RUN '[A-Za-z0-9_][-A-Za-z0-9_.]*' 'a name of letters, digits, -, _ and ., not at the start - or .'
  _know_accelerator
}

_check() { # NAME PATTERN MEANING
  [[ ${!1} =~ ^($2)$ ]] || die "$1 is '${!1}', but must be $3"
}

# Sets CHIPS, HOSTS_KIND (one_host or pod), STACK, IMAGE and DOLLARS (per hour).
_know_accelerator() {
  local kind=${ACCELERATOR_TYPE%%-*} number=${ACCELERATOR_TYPE##*-}
  local unit one_host image pod_image on_demand spot price
  read -r _ unit one_host image pod_image on_demand spot < <(
    awk -v kind="$kind" '$1 == kind' "$root/gcp/tpus.tsv") ||
    die "ACCELERATOR_TYPE is $ACCELERATOR_TYPE, but the known TPU types are" \
      "$(awk '!/^#/ {printf "%s ", $1}' "$root/gcp/tpus.tsv")(gcp/tpus.tsv)"
  CHIPS=$number
  [ "$unit" = chips ] || CHIPS=$(((number + 1) / 2))
  HOSTS_KIND=one_host
  [ "$number" -le "$one_host" ] || HOSTS_KIND=pod
  price=$on_demand
  [ "$PROVISIONING" = on_demand ] || price=$spot
  DOLLARS=$(awk "BEGIN {printf \"%.2f\", $CHIPS * $price}")

  STACK=$HOSTS_KIND
  [ "$STRATEGY" = tpu ] || STACK=cpu
  if [ -n "${RUNTIME_VERSION-}" ]; then
    IMAGE=$RUNTIME_VERSION
  elif [ "$STACK" != pod ]; then
    IMAGE=$image
  elif [ "$pod_image" = - ]; then
    die "TensorFlow is not known to work on slices of $kind (gcp/tpus.tsv): choose" \
      "$kind-$one_host or smaller, or another type"
  else
    IMAGE=$pod_image
  fi
  if [ "$STACK" = pod ]; then
    local version
    version=$(sed -n 's/^tensorflow-tpu==//p' "$root/gcp/stacks/pod.txt")
    [[ $IMAGE == tpu-vm-tf-"$version"-pod* ]] ||
      die "hosts of a slice need runtime version tpu-vm-tf-$version-pod..., because" \
        "gcp/stacks/pod.txt has tensorflow-tpu $version; RUNTIME_VERSION is $IMAGE"
  fi
}
