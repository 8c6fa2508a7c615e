"""TF_CONFIG of a cluster's worker."""

import json


def tf_config_of(workers, index):
    task = {"type": "worker", "index": index}
    return json.dumps({"cluster": {"worker": list(workers)}, "task": task})
