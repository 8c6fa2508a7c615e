"""What a stranger tries at a server: ``stranger_job.py COMMAND HOST:PORT FILE``.

Prints which of the attempts succeed, as JSON.
"""

import contextlib
import json
import os
import queue
import socket
import sys
import threading
import time

import tensorflow as tf

# More than any attempt takes that succeeds.
SECONDS = 20


def connect(server):
    host, port = server.split(":")
    socket.create_connection((host, int(port)), timeout=2).close()


def run_graph(server, make):
    """Runs an operation on a stage server."""
    config = tf.compat.v1.ConfigProto(operation_timeout_in_ms=SECONDS * 500)
    with tf.Graph().as_default():
        operation = make()
        with tf.compat.v1.Session(f"grpc://{server}", config=config) as session:
            return session.run(operation)


def list_devices(server):
    config = tf.compat.v1.ConfigProto(operation_timeout_in_ms=SECONDS * 500)
    with tf.compat.v1.Session(f"grpc://{server}", config=config) as session:
        assert session.list_devices()


def run_dataset(server, function):
    """Runs a function of a dataset on an input server."""
    service = tf.data.experimental.service.distribute("parallel_epochs", f"grpc://{server}")
    return list(tf.data.Dataset.range(1).map(function).apply(service))


def write(path):
    def function(element):
        with tf.control_dependencies([tf.io.write_file(path, "written")]):
            return tf.identity(element)

    return function


def attempts(command, server, path):
    yield "connect", lambda: connect(server)
    if command == "stage-server":
        yield "write", lambda: run_graph(server, lambda: tf.io.write_file(path, "written"))
        yield "read", lambda: run_graph(server, lambda: tf.io.read_file(__file__))
        yield "list", lambda: list_devices(server)
    else:
        yield "write", lambda: run_dataset(server, write(path))
        yield "read", lambda: run_dataset(server, lambda _: tf.io.read_file(__file__))
        yield "list", lambda: run_dataset(server, lambda _: tf.io.matching_files(f"{path}*"))


def succeeding(named):
    """Returns the names of the attempts that succeed in time, all at once."""
    ended = queue.SimpleQueue()

    def run(name, attempt):
        try:
            attempt()
            ended.put((name, True))
        except (OSError, tf.errors.OpError):
            ended.put((name, False))

    for each in named:
        # In threads, which can be abandoned, because tf.data service retries forever.
        threading.Thread(target=run, args=each, daemon=True).start()
    found = []
    until = time.monotonic() + SECONDS
    with contextlib.suppress(queue.Empty):
        for _ in named:
            found.append(ended.get(timeout=max(0, until - time.monotonic())))
    return sorted(name for name, succeeded in found if succeeded)


print(json.dumps(succeeding(list(attempts(*sys.argv[1:])))))
sys.stdout.flush()
os._exit(0)
