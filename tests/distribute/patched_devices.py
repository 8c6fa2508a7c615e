"""GPUs that TensorFlow seems to see, and a cluster's strategy that nothing starts."""

import tensorflow as tf
from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended
from tensorflow.python.eager import context


class FakeGpus:
    """Stands in for the functions of ``tf.config`` that list GPUs and make some visible.

    Attributes:
      physical: all GPUs.
      visible: those that TensorFlow would use.
      started: whether TensorFlow has started, after which that cannot change.
    """

    def __init__(self, monkeypatch, count):
        names = [f"/physical_device:GPU:{number}" for number in range(count)]
        self.physical = [tf.config.PhysicalDevice(name, "GPU") for name in names]
        self.visible = list(self.physical)
        self.started = False
        for name, own in (
            ("list_physical_devices", lambda kind: list(self.physical)),
            ("get_visible_devices", lambda kind: list(self.visible)),
            ("set_visible_devices", self.set_visible),
        ):
            monkeypatch.setattr(tf.config, name, own)
        monkeypatch.setattr(
            tf.config.experimental, "get_device_details", lambda gpu: {"device_name": "NVIDIA H100"}
        )
        # What TensorFlow's strategy counts: logical devices, of which there is one a visible GPU.
        monkeypatch.setattr(context, "num_gpus", lambda: len(self.visible))

    def set_visible(self, devices, kind):
        assert kind == "GPU"
        if self.started:
            raise RuntimeError("Visible devices cannot be modified after being initialized")
        self.visible = devices


def local_devices(resolver):
    """Returns the devices that ``MultiWorkerMirroredStrategy`` takes on a worker."""
    worker = f"/job:{resolver.task_type}/task:{resolver.task_id}"
    return CollectiveAllReduceExtended._initialize_local_devices(None, resolver, worker)[0]


class RecordedStrategy:
    """Notes with what ``MultiWorkerMirroredStrategy`` is made; its devices are those it would have.

    Attributes:
      devices: as TensorFlow's own code finds them.
      options: the communication options.
      resolver: of the cluster.
    """

    def __init__(self, cluster_resolver, communication_options):
        self.resolver = cluster_resolver
        self.devices = local_devices(cluster_resolver)
        self.options = communication_options
