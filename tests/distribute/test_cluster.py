import json

import pytest
from tf_configs import tf_config_of

from imagenet_fast.base.errors import UserError
from imagenet_fast.distribute.cluster import TAKING_PART, Cluster, hosts_of


def tf_config(cluster, kind="worker", index=0):
    task = {"type": kind, "index": index}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


def slurm(nodes, tasks_per_node, tasks, task):
    return {
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": tasks_per_node,
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_PROCID": str(task),
    }


# --- TF_CONFIG


@pytest.mark.parametrize(
    ("cluster", "kind", "index", "workers", "place"),
    [
        ({"worker": ["a:1"]}, "worker", 0, ("a:1",), 0),
        ({"worker": ["a:1", "b:1"]}, "worker", 1, ("a:1", "b:1"), 1),
        ({"worker": ["h:1", "h:2"]}, "worker", 0, ("h:1", "h:2"), 0),
        ({"worker": ["b:1"], "chief": ["a:1"]}, "chief", 0, ("a:1", "b:1"), 0),
        ({"worker": ["b:1", "c:1"], "chief": ["a:1"]}, "worker", 1, ("a:1", "b:1", "c:1"), 2),
        ({"worker": ["a:1"], "evaluator": ["z:1"]}, "worker", 0, ("a:1",), 0),
        ({"worker": ["10.0.0.1:8888", "[::1]:8888"]}, "worker", 1, None, 1),
    ],
)
def test_tf_config(cluster, kind, index, workers, place):
    got = Cluster.from_tf_config(tf_config(cluster, kind, index))
    assert got == Cluster(workers or tuple(cluster["worker"]), place)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "TF_CONFIG is not JSON"),
        ("a:1,b:1", "TF_CONFIG is not JSON"),
        ("{}", "TF_CONFIG lacks 'cluster'; expected e.g."),
        ('{"task": {"type": "worker", "index": 0}}', "TF_CONFIG lacks 'cluster'"),
        ('{"cluster": {"worker": ["a:1"]}}', "TF_CONFIG lacks 'task'"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"index": 0}}', "TF_CONFIG lacks 'type'"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker"}}', "lacks 'index'"),
        ("[]", "TF_CONFIG is []; expected e.g."),
        ("3", "TF_CONFIG is 3; expected e.g."),
        ("null", "TF_CONFIG is null; expected e.g."),
        ('{"cluster": {"worker": ["a:1"]}, "task": 0}', "expected e.g."),
        (tf_config(None)["TF_CONFIG"], "expected e.g."),
        (tf_config(["a:1"])["TF_CONFIG"], "expected e.g."),
        (tf_config({"worker": None})["TF_CONFIG"], "expected e.g."),
        (tf_config({"worker": 2})["TF_CONFIG"], "expected e.g."),
    ],
)
def test_malformed_tf_config(text, message):
    with pytest.raises(UserError) as caught:
        Cluster.from_environment({"TF_CONFIG": text})
    assert message in str(caught.value)
    assert '"task": {"type": "worker", "index": 0}}' in str(caught.value)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (tf_config({"worker": ["a:1"], "ps": ["b:1"]}), "has the job 'ps': training is synchr"),
        (tf_config({"wrker": ["a:1"]}), "has the job 'wrker'"),
        (tf_config({"worker": ["a:1"]}, "evaluator"), "task type is 'evaluator', but must be"),
        (tf_config({"worker": ["a:1"]}, "master"), "task type is 'master', but must be"),
        (tf_config({"worker": ["a:1"]}, ["worker"]), "task type is ['worker'], but must be"),
        (tf_config({"worker": ["a:1"]}, None), "task type is None, but must be"),
        (tf_config({"worker": ["a:1", "b:1"]}, index=2), "index is 2, but must be in [0, 2): it"),
        (tf_config({"worker": ["a:1"]}, index=-1), "task index is -1, but must be in [0, 1)"),
        (tf_config({"worker": ["a:1"]}, index="0"), "task index is '0', but must be in [0, 1)"),
        (tf_config({"worker": ["a:1"]}, index=0.0), "task index is 0.0, but must be in [0, 1)"),
        (tf_config({"worker": ["a:1"]}, index=None), "task index is None, but must be in [0, 1)"),
        (
            tf_config({"worker": ["a:1"]}, "chief"),
            "task index is 0, but must be in [0, 0): it has 0 chief(s)",
        ),
        (tf_config({"worker": []}), "task index is 0, but must be in [0, 0): it has 0 worker(s)"),
        (tf_config({}), "task index is 0, but must be in [0, 0): it has 0 worker(s)"),
        (tf_config({"worker": ["a"]}), "names 'a', which is not host:port"),
        (tf_config({"worker": ["a:1", "b:"]}), "names 'b:', which is not host:port"),
        (tf_config({"worker": ["a:x"]}), "names 'a:x', which is not host:port"),
        (tf_config({"worker": [":8888"]}), "names ':8888', which is not host:port"),
        (tf_config({"worker": ["8888"]}), "names '8888', which is not host:port"),
        (tf_config({"worker": ["a:0"]}), "names 'a:0', whose port is not between 1 and 65535"),
        (tf_config({"worker": ["a:65536"]}), "names 'a:65536', whose port is not between 1 and"),
        (tf_config({"worker": "a:1"}), "names 'a', which is not host:port"),
        (tf_config({"worker": {"0": "a:1"}}), "names '0', which is not host:port"),
        (tf_config({"worker": [["a:1"]]}), "names ['a:1'], which is not host:port"),
        (tf_config({"worker": ["a:1", "b:1", "a:1"]}), "names the same host:port twice"),
        (tf_config({"worker": ["a:1"], "chief": ["a:1"]}), "names the same host:port twice"),
    ],
)
def test_invalid_tf_config(environment, message):
    with pytest.raises(UserError) as caught:
        Cluster.from_environment(environment)
    assert str(caught.value).startswith("TF_CONFIG")
    assert message in str(caught.value)


def test_tf_config_of_a_worker():
    cluster = Cluster(("a:1", "b:2", "c:3"), 2)
    environment = {"TF_CONFIG": tf_config_of(cluster.workers, cluster.index)}
    assert Cluster.from_tf_config(environment) == cluster


# --- Slurm


@pytest.mark.parametrize(
    ("nodes", "tasks_per_node", "workers"),
    [
        ("node1", "2", ["node1:8888", "node1:8889"]),
        ("node[1-2]", "1(x2)", ["node1:8888", "node2:8888"]),
        ("a,b", "1(x2)", ["a:8888", "b:8888"]),
        (
            "node[1-3,10]",
            "2(x2),1,3",
            [
                *("node1:8888", "node1:8889", "node2:8888", "node2:8889"),
                *("node3:8888", "node10:8888", "node10:8889", "node10:8890"),
            ],
        ),
        # Zeros in front stay; the order is Slurm's, not the alphabet's.
        ("gpu[08-10],cpu1", "1(x4)", ["gpu08:8888", "gpu09:8888", "gpu10:8888", "cpu1:8888"]),
        ("n[9-11]", "1(x3)", ["n9:8888", "n10:8888", "n11:8888"]),
    ],
)
def test_slurm(nodes, tasks_per_node, workers):
    for index in range(len(workers)):
        environment = slurm(nodes, tasks_per_node, len(workers), index)
        assert Cluster.from_environment(environment) == Cluster(tuple(workers), index)


def test_slurm_port():
    cluster = Cluster.from_slurm(slurm("a", "2", 2, 0), port=5000)
    assert cluster.workers == ("a:5000", "a:5001")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (slurm("a,b", "1", 2, 0), "contradict each other"),
        (slurm("a", "1(x2)", 2, 0), "contradict each other"),
        (slurm("a,b", "1(x2)", 4, 0), "contradict each other.*SLURM_STEP_NUM_TASKS=4"),
        (slurm("a,b", "1(x2)", 2, 2), "contradict each other.*SLURM_PROCID=2"),
        (slurm("a,b", "1(x2)", 2, -1), "contradict each other.*SLURM_PROCID=-1"),
        (slurm("a[1-", "1(x2)", 2, 0), "cannot read Slurm's variables"),
        (slurm("a[1-x]", "1(x2)", 2, 0), "cannot read Slurm's variables"),
        (slurm("a,b", "1(x", 2, 0), "cannot read Slurm's variables"),
        (slurm("a,b", "", 2, 0), "cannot read Slurm's variables"),
        (slurm("a,b", "1(x2)", 2, "first"), "cannot read Slurm's variables"),
        (slurm("a,b", "1(x2)", "two", 0), "cannot read Slurm's variables"),
    ],
)
def test_invalid_slurm_variables(environment, message):
    with pytest.raises(UserError, match=message):
        Cluster.from_environment(environment)


def test_slurm_with_cyclic_tasks():
    """As with --distribution=cyclic, where task 1 is the second node's first."""
    environment = slurm("a,b", "2(x2)", 4, 1)
    Cluster.from_environment({**environment, "SLURMD_NODENAME": "a"})
    message = "started task 1 on b, but .* srun --distribution=block"
    with pytest.raises(UserError, match=message):
        Cluster.from_environment({**environment, "SLURMD_NODENAME": "b"})


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("login", "login"),
        ("a1,b", "a1 b"),
        ("node[1-2,08-10]", "node1 node2 node08 node09 node10"),
        (
            "rack[0-1]_blade[0-1]",
            "rack0_blade0 rack0_blade1 rack1_blade0 rack1_blade1",
        ),
        ("node[1-2].domain,x", "node1.domain node2.domain x"),
    ],
)
def test_slurm_s_lists_of_hosts(nodes, expected):
    """As `scontrol show hostnames` has them."""
    assert hosts_of(nodes) == expected.split()


@pytest.mark.parametrize(
    "nodes", ["", "a,", "a[1", "a[2-1]", "a[x]", "a b", "a[1-9999999]", "[]", "a[1-9999]b[1-9999]"]
)
def test_what_is_no_list_of_hosts(nodes):
    with pytest.raises(ValueError, match=r"not a|more than 100,000"):
        hosts_of(nodes)


@pytest.mark.parametrize(
    "missing", ["SLURM_PROCID", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"]
)
def test_slurm_without_srun(missing):
    environment = slurm("a,b", "1(x2)", 2, 0)
    del environment[missing]
    with pytest.raises(UserError, match=f"{missing} is not set: start the tasks with srun"):
        Cluster.from_environment(environment)


# --- Either


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"TF_CONFIG": ""},
        # A shell inside a job, or a job of one task.
        {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a,b"},
        slurm("a", "1", 1, 0),
    ],
)
def test_no_cluster(environment):
    assert Cluster.from_environment(environment) is None


def test_tf_config_has_priority_over_slurm():
    environment = {**slurm("a,b", "1(x2)", 2, 0), **tf_config({"worker": ["c:1", "d:1"]})}
    assert Cluster.from_environment(environment).workers == ("c:1", "d:1")


def test_os_environ_is_the_default(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", tf_config_of(("a:1", "b:1"), 1))
    assert Cluster.from_environment() == Cluster(("a:1", "b:1"), 1)


# --- The workers that take part


@pytest.mark.parametrize(
    ("text", "workers", "place"),
    [
        ("", "abcd", 2),
        ("0,1,2,3", "abcd", 2),
        ("0,2", "ac", 1),
        ("2,3", "cd", 0),
        ("2", "c", 0),
    ],
)
def test_workers_that_take_part(text, workers, place):
    addresses = [f"{host}:1" for host in "abcd"]
    environment = {**tf_config({"worker": addresses}, index=2), TAKING_PART: text}
    got = Cluster.from_environment(environment)
    assert got == Cluster(tuple(f"{host}:1" for host in workers), place)


def test_slurms_tasks_that_take_part_share_the_gpus_of_their_host():
    environment = {**slurm("n[1-2]", "2(x2)", 4, 3), TAKING_PART: "0,1,3"}
    cluster = Cluster.from_environment(environment)
    assert cluster == Cluster(("n1:8888", "n1:8889", "n2:8889"), 2)
    assert cluster.tasks_share_gpus and cluster.place_on_host() == (0, 1)


@pytest.mark.parametrize("text", ["1,0", "0,0", "0,3", "1", "-1,0", "0,x", "0,", ",", "0 ,1", "²"])
def test_wrong_workers_that_take_part(text):
    environment = {**tf_config({"worker": ["a:1", "b:1", "c:1"]}), TAKING_PART: text}
    with pytest.raises(UserError, match=r"IMAGENET_FAST_WORKERS is .* 3 workers, among them 0"):
        Cluster.from_environment(environment)
